"""A run that has failed is gone on from its last committed update, and the update that failed is run again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]

FAULTY = """
import os
import torch
from torch import nn
from parts import Net, Regress

class Faulty(Net):
    def forward(self, x):
        if self.training and os.environ.get("FAULT") == "raise" and marked(x):
            raise RuntimeError("cannot take this batch")
        return super().forward(x)

def marked(x):
    return bool((x.round(decimals=3) == 0.806).any())

class Infinite(Regress):
    def loss(self, output, batch):
        return super().loss(output, batch) * (float("inf") if marked(batch[0]) else 1.0)
"""


@pytest.fixture
def faulty(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (recipe / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("FAULT", "raise")
    return recipe


def test_the_data_hold_the_marked_sample_once(recipe: Path) -> None:
    rows = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    assert int((rows.round(decimals=3) == 0.806).any(1).sum()) == 1


def test_an_error_in_the_model_is_shown_with_its_place(
    evenstep: Run, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = evenstep("train", "run.toml", "--model.target", "faulty.py:Faulty")
    assert failed.code == 1
    run = faulty / "runs" / "tiny"
    (failure,) = (run / "failures").iterdir()
    update = int(failure.name[7:15])
    assert failure.name == f"update-{update:08d}-rank-00000"
    assert read_checkpoint(run).update == update - 1
    for path in (failure, run, run / "checkpoints" / f"step-{update - 1:08d}"):
        again = evenstep("replay", str(path))
        assert again.code == 1
        assert f"replay      update {update} on cpu, 32-true" in again.out
        assert "it fails    in the forward of micro-batch" in again.out
        assert "RuntimeError: cannot take this batch" in again.out
        assert "It was raised in the model (Faulty)." in again.out
    monkeypatch.setenv("FAULT", "none")
    healed = evenstep("replay", str(run), "--train.precision", "bf16-mixed")
    assert (healed.code, "bf16-mixed" in healed.out, "it does not fail" in healed.out) == (0, True, True)


def test_a_run_that_failed_goes_on_to_the_bits_of_the_undisturbed_one(
    evenstep: Run, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evenstep("train", "run.toml", "--model.target", "faulty.py:Faulty").code == 1
    monkeypatch.setenv("FAULT", "none")
    assert evenstep("resume", "runs/tiny").code == 0
    assert evenstep("train", "run.toml", "--model.target", "faulty.py:Faulty", "--name", "straight").code == 0
    done = evenstep("inspect", "runs/tiny", "--diff", "runs/straight")
    assert not [line for line in done.out.splitlines() if line.startswith(("model/", "optimizer/"))]


def test_a_number_that_is_not_finite_is_shown_with_its_place(evenstep: Run, faulty: Path) -> None:
    failed = evenstep("train", "run.toml", "--task.target", "faulty.py:Infinite")
    assert failed.code == 1
    again = evenstep("replay", "runs/tiny")
    assert again.code == 1
    assert "it fails    all outputs are finite, but the gradients of" in again.out


def test_a_run_that_has_not_failed_has_nothing_to_replay(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml").code == 0
    done = evenstep("replay", "runs/tiny")
    assert done.code == 1
    assert "there is no failure in `runs/tiny/failures`" in done.err
