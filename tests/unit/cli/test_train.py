import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_says_what_it_will_do_and_where_it_is(evenstep: Run) -> None:
    done = evenstep("train", "run.toml")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:5] == [
        "run folder  runs/tiny",
        "model       Net, 17 parameters, on cpu",
        "data        train 40 samples, valid 16 samples",
        "batches     data: global_batch_size 8, micro_batch_size 3",
        "run         6 updates (1.2 epochs of 5 updates), precision 32-true, seed 42",
    ]
    assert lines[-2:] == ["run folder  runs/tiny", "report      runs/tiny/report.html"]


@pytest.mark.parametrize(("given", "code"), [("4", 4), ("0", 1)])
def test_sys_exit_in_a_runs_own_code_is_said_and_such_a_run_is_not_done(
    evenstep: Run, recipe: Path, given: str, code: int
) -> None:
    with (recipe / "parts.py").open("a") as parts:
        parts.write(
            "import sys\n"
            "class Leaves(Regress):\n"
            "    def loss(self, output, batch):\n"
            f"        if self.now.update == 4 and self.now.is_training: sys.exit({given})\n"
            "        return super().loss(output, batch)\n"
        )
    done = evenstep("train", "run.toml", "--task.target", "parts.py:Leaves")
    assert done.code == code
    assert done.err.startswith("evenstep: SystemExit") and "(raised at " in done.err and "parts.py:" in done.err
    assert "Saved up to step-00000003: `evenstep resume runs/tiny` continues there" in done.err


def test_a_run_folder_holds_all_that_there_is_to_know(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml", "--seed", "7").code == 0
    folder = recipe / "runs" / "tiny"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.toml", "environment.json", "metrics.jsonl", "status.json", "report.html"),
        *("checkpoints", "recipe", "starts.jsonl", "settings.json"),
    }
    saved = tomllib.loads((folder / "config.toml").read_text())
    assert (saved["seed"], saved["recipe"]) == (7, "recipe")
    assert (folder / "recipe" / "parts.py").read_text() == (recipe / "parts.py").read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"].startswith("2.")
    updates = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in updates if "train/loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_exists_is_left_as_it_is(evenstep: Run, recipe: Path) -> None:
    evenstep("train", "run.toml")
    before = tree(recipe / "runs")
    done = evenstep("train", "run.toml", "--seed", "1")
    assert done.code == 1
    assert "`evenstep resume runs/tiny`" in done.err
    assert "`--name ANOTHER`" in done.err
    assert tree(recipe / "runs") == before


def test_the_run_outlives_its_reader(recipe: Path) -> None:
    command = f"{sys.executable} -m evenstep train run.toml | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run folder  runs/tiny\n", "")
    assert read_checkpoint(recipe / "runs" / "tiny").update == 6


def test_a_process_among_some_that_may_be_lost_does_not_train_alone(
    evenstep: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"TORCHFT_LIGHTHOUSE": "http://a:1", "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    done = evenstep("train", "run.toml")
    assert done.code == 2
    assert "`launch.lost_rank`" in done.err
    assert not (recipe / "runs").exists()


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_resume_with_another_rate_is_refused_unless_it_starts_there_and_says_so(
    command: str, evenstep: Run, recipe: Path
) -> None:
    assert evenstep("train", "run.toml").code == 0
    rate = ["--optimizer.lr", "0.5", "--train.updates", "7"]
    done = evenstep(command, "run.toml", "--resume", "auto", *rate)
    assert done.code == 1
    assert "the optimizer's `lr` was 0.01 and is now 0.5" in done.err
    done = evenstep(command, "run.toml", "--name", "second", "--resume", "runs/tiny", *rate)
    assert done.code == 0, done.err
    assert command == "check" or "the optimizer's `lr` was 0.01 and is now 0.5" in done.out


FAILS_ONCE = """
from pathlib import Path
from evenstep import Hook

class Once(Hook):
    def after_update(self, event):
        struck = Path("struck")
        if event.update == 3 and not struck.exists():
            struck.touch()
            raise RuntimeError("once")
"""
