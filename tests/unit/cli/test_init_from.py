"""Runs that begin with weights of something else: `init_from` in a run file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


def weights(run: str) -> dict[str, Any]:
    return read_checkpoint(run).state["model"]


@pytest.fixture
def first(evenstep: Run, recipe: Path) -> Path:
    """A run of six updates with an average, saved at each second."""
    assert evenstep("train", "run.toml", "--train.ema.decay", "0.9", "--name", "first").code == 0
    return recipe / "runs" / "first"


def test_a_run_begins_with_the_weights_and_counts_from_its_own_beginning(evenstep: Run, first: Path) -> None:
    done = evenstep(
        "train", "run.toml", "--init_from.path", str(first), "--train.updates", "2", "--optimizer.lr", "1e-30"
    )
    assert done.code == 0, done.err
    assert f"weights     {len(weights(str(first)))} tensors from {first}" in done.out
    tuned, began = weights("runs/tiny"), weights(str(first))
    assert all(torch.allclose(tuned[name], value) for name, value in began.items())
    assert read_checkpoint("runs/tiny").state["progress"]["update"] == 2


def test_a_run_that_goes_on_needs_the_weights_no_more(evenstep: Run, first: Path) -> None:
    assert evenstep("train", "run.toml", "--train.updates", "2", "--init_from.path", str(first)).code == 0
    first.rename(first.with_name("moved"))
    done = evenstep("resume", "runs/tiny", "--train.updates", "6")
    assert done.code == 0, done.err
