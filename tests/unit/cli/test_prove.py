"""`evenstep prove`: a table, a file of JSON and an exit code, from a run file; what fails is named in all three."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
QUICK = ("--rows", "loss,cuts 4,optimizer", "--updates", "2")


def test_a_sound_run_holds_in_every_row_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    done = evenstep("prove", "run.toml", "--json", "out/proof.json", *QUICK)
    assert done.code == 0, done.out + done.err
    made = json.loads((recipe / "out/proof.json").read_text())
    assert made["holds"] and made["run"] == "run.toml" and made["updates"] == 2
    rows = {row["row"]: row for row in made["rows"]}
    assert [*rows] == ["loss", "cuts 4", "optimizer"]
    assert all(row["holds"] for row in rows.values()), rows
    assert 0 <= rows["cuts 4"]["value"] <= rows["cuts 4"]["bound"] < 1e-10
    lines = done.out.splitlines()
    assert lines[0].split() == ["row", "difference", "bound", "s", "compared"]
    assert lines[-1].startswith("3 rows hold")
    after = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    assert after - before == {recipe / "out", recipe / "out/proof.json"}


def test_what_depends_on_the_cut_is_named_and_gives_exit_code_1(evenstep: Run, recipe: Path) -> None:
    (recipe / "normed.py").write_text(
        "from torch import nn\n"
        "class Normed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.norm(self.first(x)))\n"
    )
    arguments = ("--model.target", "normed.py:Normed", "--rows", "cuts 4", "--json", "proof.json")
    done = evenstep("prove", "run.toml", *arguments, "--updates", "1")
    assert done.code == 1, done.out + done.err
    said = json.loads((recipe / "proof.json").read_text())["rows"][0]
    assert said["holds"] is False and said["value"] > said["bound"]
    assert "module `norm`" in said["causes"][0]
    assert "FAILS" in done.out and "module `norm`" in " ".join(done.out.split())


DATA = """
import random
import torch
from parts import pairs
class Remembered:
    def __init__(self): self.rows, self.kept = pairs(count=400), {}
    def __len__(self): return 400
    def __getitem__(self, index):
        if index not in self.kept:
            x, y = self.rows[index]
            self.kept[index] = (x + random.random(), y)
        return self.kept[index]
class OfWorker(Remembered):
    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        x, y = self.rows[index]
        return x + (0 if info is None else 1 + info.id), y
"""


@pytest.mark.parametrize(
    ("target", "arguments", "row", "named"),
    [
        pytest.param("Remembered", (), "resume", "the batch", marks=pytest.mark.slow),
        ("OfWorker", ("--data.num_workers", "3"), "workers 2", "the batch"),
    ],
)
def test_what_only_a_second_epoch_or_a_worker_shows_is_named(
    evenstep: Run, recipe: Path, target: str, arguments: tuple[str, ...], row: str, named: str
) -> None:
    (recipe / "data.py").write_text(DATA)
    more = ("--data.train.target", f"data.py:{target}", *arguments, "--train.updates", "none", "--train.epochs", "1")
    done = evenstep("prove", "run.toml", *more, "--rows", row, "--json", "proof.json")
    assert done.code == 1, done.out + done.err
    (said,) = json.loads((recipe / "proof.json").read_text())["rows"]
    assert said["row"] == row and named in said["causes"][0], said


def test_a_run_of_epochs_keeps_its_length_though_the_data_are_few(evenstep: Run, recipe: Path) -> None:
    (recipe / "data.py").write_text(DATA)
    long = ("--data.train.target", "parts.py:pairs", "--train.updates", "none", "--train.epochs", "3")
    warm = ("--lr_schedule", '{kind = "cosine", warmup_updates = 10}')  # of 15 updates; 20 samples alone would make 6
    done = evenstep("prove", "run.toml", *long, *warm, "--rows", "optimizer", "--updates", "2")
    assert done.code == 0 and "none fails" in done.out, done.out + done.err


def test_a_run_that_fails_says_so(evenstep: Run, recipe: Path) -> None:
    (recipe / "broken.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Linear):\n"
        "    def __init__(self): super().__init__(1, 1)\n"
        "    def forward(self, x): raise ValueError('out of ideas')\n"
    )
    done = evenstep("prove", "run.toml", "--model.target", "broken.py:Broken", "--rows", "loss,again,cuts 2")
    assert done.code == 1
    assert done.out.count("out of ideas") == 3 and "0 rows hold" in done.out


def test_a_run_whose_rates_follow_evaluations_is_proved_as_it_is_before_the_first(evenstep: Run, recipe: Path) -> None:
    schedule = '{kind = "plateau", warmup_updates = 2}'
    arguments = ("--lr_schedule", schedule, "--evaluation.every_updates", "1")
    done = evenstep("prove", "run.toml", *arguments, *QUICK)
    assert done.code == 0 and "none fails" in done.out, done.out + done.err
