"""`evenstep average`, on runs that the command line has trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


def test_the_last_checkpoints_of_a_run_are_averaged(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml").code == 0
    done = evenstep("average", "runs/tiny", "--last", "3")
    assert done.code == 0, done.err
    path = Path("runs/tiny/averages/last-3-step-00000006")
    assert f"checkpoint  {path}" in done.out
    assert "averaged    step-00000002, step-00000004, step-00000006" in done.out
    steps = [read_checkpoint(f"runs/tiny/checkpoints/step-0000000{n}").state["model"] for n in (2, 4, 6)]
    mean = read_checkpoint(path).state["model"]
    for name, value in mean.items():
        wanted = sum(one[name].double() for one in steps) / 3
        assert torch.equal(value, wanted.to(value.dtype))  # type: ignore[union-attr]
    assert evenstep("inspect", str(path), "--verify").code == 0
    assert evenstep("resume", "runs/tiny", "--train.updates", "8").code == 0  # the run does not mind
