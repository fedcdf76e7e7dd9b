"""`evenstep find-lr`: rates are tried as the run would, and nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_rates_are_tried_and_one_is_suggested_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recipe.rglob("*") if path.suffix != ".pyc"}
    done = evenstep("find-lr", "run.toml", "--tries", "12", "--highest=0.5", "--data.micro_batch_size", "4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 14 and lines[0].split() == ["learning", "rate", "loss", "smoothed"]
    assert [lines[1].split()[0], lines[12].split()[0]] == ["1.0e-07", "5.0e-01"]
    assert lines[13].startswith("suggested   ")
    assert {path: path.stat().st_mtime_ns for path in recipe.rglob("*") if path.suffix != ".pyc"} == before


def test_a_run_that_would_go_back_to_a_checkpoint_tries_rates_too(evenstep: Run, recipe: Path) -> None:
    back = ["--failures.non_finite", "rewind", "--failures.loss_spike", "rewind_past", "--failures.max_rewinds", "2"]
    done = evenstep("find-lr", "run.toml", "--tries", "3", *back)
    assert done.code == 0, done.err
