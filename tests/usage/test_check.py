"""`evenstep check` means it: what it passes, `train` does not refuse, neither when it begins nor hours later."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_recipe
from command_programs import command
from launched import on_ranks

from evenstep.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe's folder, which is the working directory as well."""
    tiny_recipe.write(tmp_path)
    return tmp_path


@pytest.fixture
def run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process; gives its code and what it has said."""

    def act(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return act


def test_a_folder_that_is_used_is_refused_before_any_rank_is_started(run: Command, recipe: Path) -> None:
    (recipe / "runs" / "tiny").mkdir(parents=True)
    (recipe / "runs" / "tiny" / "config.toml").write_text("")
    code, out, err = run("train", "run.toml", "--launch.ranks", "2")
    assert code == 1
    assert "exists already" in err
    assert "ranks " not in out


def test_a_run_that_goes_on_is_tried_from_where_it_is(run: Command) -> None:
    assert run("train", "run.toml")[0] == 0
    code, out, err = run("check", "run.toml", "--resume", "auto", "--train.updates", "6")
    assert code == 0, err
    assert "checked     1 update" in out
    code, out, _ = run("check", "run.toml", "--resume", "auto")
    assert code == 0
    assert "checked     no update, since the run is done" in out


PASSES = {
    "as it is": [],
    "rewinding": ["--failures.non_finite", "rewind", "--failures.loss_spike", "rewind_past"],
    "16-mixed": ["--train.precision", "16-mixed"],
    "an average": ["--train.ema.decay", "0.9"],
    "the best": ["--checkpoint.best", '{metric = "valid/close", mode = "max"}'],
    "stopping early": ["--hooks.early_stop.patience_evaluations", "3"],
}


@pytest.mark.parametrize("name", PASSES)
def test_what_check_passes_trains(name: str, run: Command, recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recipe.rglob("*")}
    code, out, err = run("check", "run.toml", *PASSES[name])
    assert code == 0, err
    assert "checked     1 update of 8 samples in 2 micro-batches" in out
    assert "evaluated   valid, its first batch: " in out
    assert {path: path.stat().st_mtime_ns for path in recipe.rglob("*")} == before
    code, _, err = run("train", "run.toml", *PASSES[name])
    assert code == 0, err


RANKS = {
    "ddp": ["--parallel.strategy", "ddp"],
    "fsdp": ["--parallel.strategy", "fsdp", "--optimizer.name", "AdamW"],
    "ordered fsdp": ["--parallel.strategy", "fsdp", "--parallel.reduction", "ordered"],
    "zero1": ["--parallel.strategy", "zero1"],
    "ordered": ["--parallel.reduction", "ordered"],
    "a pipeline": ["--parallel.pipeline", "2", "--model.target", "parts.py:layers"],
}


@pytest.mark.parametrize(
    "name", [name if name in ("fsdp", "a pipeline") else pytest.param(name, marks=pytest.mark.slow) for name in RANKS]
)
def test_ranks_build_and_try_what_each_of_them_holds(name: str, recipe: Path) -> None:
    first, second = on_ranks(2, command, str(recipe), "check", "run.toml", *RANKS[name])
    assert first[0] == second[0] == 0, (first, second)
    assert "checked     1 update of 8 samples in 2 micro-batches" in first[1]
    assert second[1] == ""
    assert not (recipe / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [RANKS["ddp"], [*RANKS["ordered"], "--launch.ranks", "2"], RANKS["a pipeline"]],
    ids=" ".join,
)
def test_check_starts_the_ranks_that_the_run_is_for(settings: list[str], recipe: Path) -> None:
    line = [sys.executable, "-m", "evenstep", "check", "run.toml", *settings]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks       2 on this machine" in done.stdout
    assert not (recipe / "runs").exists()
