"""Runs that begin from a checkpoint of another, with some of it begun afresh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


@pytest.fixture
def first(evenstep: Run, recipe: Path) -> str:
    assert evenstep("train", "run.toml", "--name", "first", "--train.updates", "4").code == 0
    return "runs/first"


def test_a_requested_reset_happens_and_the_run_continues_normally(evenstep: Run, first: str) -> None:
    given = ["--resume", first, "--reset", "optimizer,data", "--train.updates", "10", "--optimizer.name", "SGD"]
    done = evenstep("train", "run.toml", *given)
    assert done.code == 0, done.err
    assert "`optimizer` is reset" in done.out
    assert "`data` is reset" in done.out
    state = read_checkpoint("runs/tiny").state
    assert state["optimizer"]["class"] == "SGD"
    assert state["progress"]["update"] == 10
    assert state["run"]["begun"] == {"data": 4}
    again = evenstep("resume", "runs/tiny", "--train.updates", "12")
    assert again.code == 0, again.err
    assert "is reset" not in again.out
    assert read_checkpoint("runs/tiny").state["run"]["begun"] == {"data": 4}


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("optimizer", ["--optimizer.weight_decay_on", "matrices"]),
        ("data", ["--data.train.args.count", "48"]),
    ],
)
def test_a_state_unlike_the_saved_state_names_its_reset_and_then_resets(
    evenstep: Run, first: str, part: str, changed: list[str]
) -> None:
    given = ["train", "run.toml", "--resume", first, "--train.updates", "6", *changed]
    assert f'`resume = "PATH"` and `reset = ["{part}"]`' in evenstep(*given).err
    done = evenstep(*given, "--reset", f'["{part}"]')
    assert done.code == 0, done.err
