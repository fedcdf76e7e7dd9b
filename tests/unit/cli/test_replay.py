"""A run that has failed is gone on from its last committed update, and the update that failed is run again."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint, write_failure

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

class InUpdate3(Regress):
    def loss(self, output, batch):
        if self.now.is_training and self.now.update == 3 and self.seen == 2:
            raise RuntimeError("cannot be computed in update 3")
        return super().loss(output, batch)

    seen = 0

    def after_update(self, event):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
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


def test_what_tasks_ask_and_have_saved_is_that_of_the_update_that_failed(evenstep: Run, faulty: Path) -> None:
    assert evenstep("train", "run.toml", "--task.target", "faulty.py:InUpdate3").code == 1
    again = evenstep("replay", "runs/tiny")
    assert (again.code, "it fails    in the forward of micro-batch" in again.out) == (1, True), again.out


def test_an_update_of_several_ranks_is_run_again_in_one_process(
    evenstep: Run, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evenstep("train", "run.toml", "--model.target", "faulty.py:Faulty").code == 1
    (failure,) = (faulty / "runs" / "tiny" / "failures").iterdir()
    lost = {**read_checkpoint(failure).state["failure"], "error": "LostRankError: rank 1 failed"}
    failure.rename(failure.with_name(f"{failure.name[:-1]}1"))
    write_failure(faulty / "runs" / "tiny", lost["update"], 0, lost)
    config = faulty / "runs" / "tiny" / "config.toml"
    text = config.read_text().replace('strategy = "auto"', 'strategy = "local"').replace("ranks = 1", "ranks = 2")
    config.write_text(text.replace("every_updates = 16", "every_updates = 3"))
    monkeypatch.setenv("EVENSTEP_LAUNCH__RANKS", "2")
    again = evenstep("replay", "runs/tiny")
    assert "rank-00001: RuntimeError: cannot take this batch" in again.out, again.err
    assert "it fails    in the forward of micro-batch" in again.out
    refused = evenstep("replay", "runs/tiny", "--launch.ranks", "2")
    assert "`launch.ranks` can't be set for `evenstep replay`, which runs in one process; leave it out." in refused.err


def test_a_failure_whose_parameters_nobody_could_save_says_how_to_come_by_them(evenstep: Run, faulty: Path) -> None:
    assert evenstep("train", "run.toml", "--model.target", "faulty.py:Faulty").code == 1
    newest = read_checkpoint(faulty / "runs" / "tiny").path
    shutil.rmtree(newest)
    done = evenstep("replay", "runs/tiny")
    assert "evenstep resume runs/tiny --checkpoint.every_updates 1" in done.err
    assert evenstep("resume", "runs/tiny", "--checkpoint.every_updates", "1").code == 1
    assert "RuntimeError: cannot take this batch" in evenstep("replay", "runs/tiny").out
