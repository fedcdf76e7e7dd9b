"""Commands beside `train` and `resume`: each does its work on a small run, or ends with a code."""

import json
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file
from scripts import Script
from torch import nn

from evenstep.checkpoint import read_checkpoint, write_checkpoint
from evenstep.cli import main
from evenstep.cli.tools import recipes, shapes_of
from evenstep.config.build import build_parts
from evenstep.config.load import open_run
from evenstep.pipeline import SCHEDULES
from evenstep.tools.planning.text import read_plans

Run = Callable[..., Any]


@pytest.fixture
def trained(evenstep: Run, recipe: Path) -> Path:
    """A run of six updates with an average, saved at each second."""
    assert evenstep("train", "run.toml", "--train.ema.decay", "0.9", "--name", "first").code == 0
    return Path("runs/first")


def weights(run: Path | str, part: str = "model") -> dict[str, Any]:
    return read_checkpoint(run).state[part]


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix != ".pyc"}


def test_the_last_checkpoints_of_a_run_are_averaged_and_the_run_goes_on(evenstep: Run, trained: Path) -> None:
    done = evenstep("average", str(trained), "--last", "3")
    assert done.code == 0, done.err
    steps = [weights(trained / f"checkpoints/step-0000000{n}") for n in (2, 4, 6)]
    for name, value in weights(trained / "averages/last-3-step-00000006").items():
        assert torch.equal(value, (sum(one[name].double() for one in steps) / 3).to(value.dtype))  # type: ignore[union-attr]
    assert evenstep("resume", str(trained), "--train.updates", "8").code == 0


def test_a_run_is_exported_and_another_begins_with_it_and_goes_on_without(evenstep: Run, trained: Path) -> None:
    done = evenstep("export", str(trained), "--to", "out/model.safetensors", "--average")
    assert done.code == 0, done.err
    average, exported = weights(trained, "ema"), load_file("out/model.safetensors")
    assert all(torch.equal(value, average[name]) for name, value in exported.items())
    small = ("--train.updates", "2", "--optimizer.lr", "1e-30")
    begun = evenstep("train", "run.toml", "--name", "second", "--init_from.path", "out", *small)
    assert begun.code == 0, begun.err
    assert all(torch.allclose(value, exported[name]) for name, value in weights("runs/second").items())
    Path("out").rename("moved")
    assert evenstep("resume", "runs/second", "--train.updates", "4").code == 0


LAYERS = """
from evenstep.pipeline import Layer, Layers

def in_layers(width=5):
    first = Layer("first", lambda: nn.Sequential(nn.Linear(2, width), nn.Dropout(0.1)))
    return Layers([first, Layer("last", lambda: nn.Linear(width, 1))])
"""


def test_of_an_optimizer_that_evaluates_other_parameters_those_are_exported(evenstep: Run, recipe: Path) -> None:
    pytest.importorskip("schedulefree")
    with (recipe / "parts.py").open("a") as file:
        file.write(LAYERS)
    free = ("--optimizer.name", "none", "--optimizer.target", "schedulefree:AdamWScheduleFree")
    free = (*free, "--optimizer.args", "{warmup_steps = 2}", "--lr_schedule", "none")
    assert evenstep("train", "run.toml", *free, "--model.target", "parts.py:in_layers").code == 0
    assert evenstep("export", "runs/tiny", "--to", "model.safetensors").code == 0
    exported = load_file("model.safetensors")
    with open_run(Path("runs/tiny/config.toml")) as opened:
        parts = build_parts(opened.config)
        trainer = parts.trainer()
        trainer.resume("runs/tiny")
        trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        parts.optimizer.eval()  # type: ignore[attr-defined]
        evaluated = trainer.model.state_dict()
        parts.close()
    assert exported.keys() == evaluated.keys()
    assert all(torch.equal(value, exported[name]) for name, value in evaluated.items())
    assert not all(torch.equal(value, exported[name]) for name, value in trained.items())


def test_rates_are_tried_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = files(recipe)
    done = evenstep("find-lr", "run.toml", "--tries", "12", "--highest=0.5", "--data.micro_batch_size", "4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [lines[1].split()[0], lines[12].split()[0]] == ["1.0e-07", "5.0e-01"]
    assert lines[13].startswith("suggested   ")
    assert files(recipe) == before


def test_a_checkpoint_is_described_and_only_verifying_finds_a_flipped_bit(evenstep: Run, tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(3, 2)}, "progress": {"update": 5}}
    path = write_checkpoint(tmp_path / "checkpoints", 5, state, resumed_from="runs/old/checkpoints/step-00000003")
    done = evenstep("inspect", str(tmp_path))
    assert done.code == 0
    for said in ("step-00000005: update 5", "runs/old/checkpoints/step-00000003", "1 tensor, 6 elements, 24 B"):
        assert said in done.out
    assert evenstep("inspect", "--verify", str(path)).code == 0
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert [evenstep("inspect", str(path), *more).code for more in ((), ("--verify",))] == [0, 1]


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_a_copy_of_each_recipe_is_a_run_of_its_own_name(evenstep: Run, recipe: str) -> None:
    done = evenstep("new", "mine", "--from", recipe)
    assert done.code == 0, done.err
    assert tomllib.loads(Path("mine/run.toml").read_text())["name"] == "mine"
    assert {file.name for file in Path("mine").iterdir()} == {file.name for file in recipes()[recipe].iterdir()} - {
        "__pycache__"
    }


@pytest.mark.parametrize("arguments", [["mine", "--from", "digit"], ["mine"], ["there", "--from", "digits"]])
def test_what_cannot_be_made_leaves_nothing(evenstep: Run, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert evenstep("new", *arguments).code == 2
    assert sorted(tmp_path.rglob("*")) == before


def rows(out: str) -> dict[str, list[str]]:
    """The cells of a table of schedules."""
    lines = [line.lstrip("*! ").split() for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0] in SCHEDULES and len(cells) > 4}


def test_schedules_are_compared_and_written_as_the_suffix_says(evenstep: Run, recipe: Path) -> None:
    size = ("plan", "--ranks", "4", "--microbatches", "8")
    done = evenstep(*size)
    assert done.code == 0, done.err
    assert list(rows(done.out)) == list(SCHEDULES)
    assert rows(done.out)["zb_v"] == ["8", "25.5", "ms", "5.9%", "4", "-"]
    assert evenstep(*size, "--schedule", "zb_h1", "--out", "new/plan.json").code == 0
    assert len(json.loads(Path("new/plan.json").read_text())["traceEvents"]) == 4 + 4 * 8 * 3
    assert evenstep(*size, "--schedule", "zb_h1", "--out", "new/plan.txt").code == 0
    order = SCHEDULES["zb_h1"].order(SCHEDULES["zb_h1"].layout(4), range(8))
    assert read_plans(Path("new/plan.txt").read_text()) == order
    assert evenstep(*size, "--schedule", "new/plan.txt").code == 0


def test_the_layers_of_a_run_are_measured_and_cut(evenstep: Run, recipe: Path) -> None:
    (recipe / "chain.py").write_text(
        "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))\n"
    )
    chain = ["plan", "run.toml", "--model.target", "chain.py:model", "--parallel.pipeline", "2"]
    done = evenstep(*chain, "--memory-gib", "1")
    assert done.code == 0, done.err
    assert "2 ranks, 3 micro-batches" in done.out and "parallel.split_at = [" in done.out
    assert "MiB" in rows(done.out)["1f1b"]
    assert evenstep(*chain, "--memory-gib", "1e-9").code == 1


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}\n')
        (folder / "config.toml").write_text(f'name = "{name}"\n[optimizer]\nlr = {lr}\n')
    return tmp_path / "runs"


def test_a_run_has_its_page_and_several_share_one(evenstep: Run, runs: Path) -> None:
    assert evenstep("report", "runs/a").out == "runs/a/report.html\n"
    assert evenstep("report", "runs/a", "runs/b").out == "runs/report.html\n"
    text = (runs / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert evenstep("report", "runs/a", "--to", "new/one.html").code == 0
    assert Path("new/one.html").exists()
    for wrong in (["runs/a", "runs/none"], ["runs"], ["runs/a", "--follow", "--to", "x.html"]):
        assert evenstep("report", *wrong).code != 0


def test_followed_runs_are_served_until_ctrl_c(runs: Path) -> None:
    script = Script("-m", "evenstep", "report", "runs/a", "runs/b", "--follow")
    script.wait_for(lambda: "\n" in script.said(), timeout_s=60)
    address = script.said().split()[0]
    with urlopen(address, timeout=30) as answer:
        assert "2 runs" in answer.read().decode()
    script.send_signal(signal.SIGINT)
    assert script.ended(30).code == 0


def test_each_module_has_its_shape_and_parameters(evenstep: Run, recipe: Path) -> None:
    done = evenstep("summary", "run.toml", "--model.args", "{width = 4}")
    assert done.code == 0, done.err
    assert [line.split() for line in done.out.splitlines()[1:4]] == [
        ["Net", "3×1", "17", "17"],
        ["layers", "Sequential", "3×1", "17", "17"],
        ["0", "Linear", "3×4", "12", "12"],
    ]
    assert len(evenstep("summary", "run.toml", "--depth", "1").out.splitlines()) == 3 + 2
    assert shapes_of(nn.LSTM(4, 5), torch.zeros(7, 2, 4)) == {"": "7×2×5, 1×2×5, 1×2×5"}


SEEN = """
import json
from evenstep import Hook

class Seen(Hook):
    def before_train(self, event):
        self.trained, self.evaluated = [], []

    def after_microbatch(self, event):
        seen = self.trained if self.trainer.model.training else self.evaluated
        seen.append(len(event.batch[0]))

    def after_train(self, event):
        (self.trainer.folder / "seen.json").write_text(json.dumps([self.trained, self.evaluated]))
"""


def test_a_limit_ends_each_epoch_and_each_evaluation_early(evenstep: Run, recipe: Path) -> None:
    (recipe / "seen.py").write_text(SEEN)
    hooks = ["--hooks", '[{target = "seen.py:Seen"}]', "--train.check_loss", "false"]
    done = evenstep("train", "run.toml", *hooks, "--limit_batches", "2")
    assert done.code == 0, done.err
    trained, evaluated = json.loads((recipe / "runs" / "tiny" / "seen.json").read_text())
    assert len(trained) == 6 * 3  # updates, of three micro-batches
    assert evaluated == [3, 3] * 2  # two of six batches, twice


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_under_standard_output_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 1


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


QUICK = ("--rows", "loss,cuts 4", "--updates", "2")


def test_a_sound_run_holds_in_every_row_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    done = evenstep("prove", "run.toml", "--json", "out/proof.json", *QUICK)
    assert done.code == 0, done.out + done.err
    made = json.loads((recipe / "out/proof.json").read_text())
    assert made["holds"] and made["run"] == "run.toml" and made["updates"] == 2
    rows = {row["row"]: row for row in made["rows"]}
    assert [*rows] == ["loss", "cuts 4"]
    assert all(row["holds"] for row in rows.values()), rows
    assert 0 <= rows["cuts 4"]["value"] <= 1e-10 < rows["cuts 4"]["bound"]
    lines = done.out.splitlines()
    assert lines[0].split() == ["row", "difference", "bound", "s", "compared"]
    assert lines[-1].startswith("2 rows hold")
    after = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    assert after - before == {recipe / "out", recipe / "out/proof.json"}
