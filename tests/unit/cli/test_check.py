"""`evenstep check` and `evenstep prove`: what would go wrong is named, and nothing else is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_a_good_run_is_built_and_tried_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recipe.rglob("*")}
    settings = ["--log.writers", '["console", "jsonl", "csv", "tensorboard"]', "--train.ema.decay", "0.9"]
    done = evenstep("check", "run.toml", *settings, "--checkpoint.best.metric", "valid/loss")
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in recipe.rglob("*")} == before
    assert done.out.splitlines()[0] == "model       Net, 17 parameters, on cpu"
    assert "checked     1 update of 8 samples in 3 micro-batches: train/loss " in done.out


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        (["--train.updates", "0", "--seed", "x"], 2, "2 faults in the configuration"),
        (["--data.train.target", "wrong.py:wide"], 1, "shapes cannot be multiplied"),
        (["--task.target", "wrong.py:NotFinite"], 1, "its gradient is not finite"),
        (["--data.evaluations.valid", '{target = "wrong.py:empty"}'], 2, "`data.evaluations.valid`"),
        (["--data.evaluations.valid", '{target = "wrong.py:Broken", micro_batch_size = 20}'], 1, "sample 13"),
        (["--hooks", '[{target = "wrong.py:Misspelt"}]'], 1, "did you mean `after_update`?"),
    ],
)
def test_what_would_go_wrong_is_found(evenstep: Run, recipe: Path, settings: list[str], code: int, says: str) -> None:
    done = evenstep("check", "run.toml", *settings)
    assert done.code == code
    assert says in done.err
    assert not (recipe / "runs").exists()


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
