"""Runs with one fault each: a row fails, and what it says names the fault."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from prove_mutants import MUTANTS, Classify, Net, OnlyFloat32, Run, Unused, of_transformers
from prove_unusual import UNUSUAL

from evenstep.events import Hook
from evenstep.tools.prove.rows import Verdict

NEEDS_FOUR = ("hook with a count",)


def verdicts(run: Run, *rows: str, updates: int = 4) -> dict[str, Verdict]:
    """What rows say of a run, all of them by default."""
    made = run.prover(updates).rows()
    return {name: row() for name, row in made.items() if not rows or name in rows}


def test_a_sound_run_fails_no_row() -> None:
    found = verdicts(Run())
    assert {name for name, verdict in found.items() if verdict.holds} >= {
        *("loss", "again", "cuts 2", "cuts 4", "cuts ragged", "resume"),
    }
    assert not [name for name, verdict in found.items() if verdict.holds is False]


def test_what_is_keyed_cast_frozen_cached_or_counted_for_a_log_fails_no_row() -> None:
    found = verdicts(UNUSUAL, "loss", "again", "cuts 4", "cuts ragged", "resume")
    assert all(verdict.holds for verdict in found.values()), found


def test_a_model_that_is_not_for_float64_is_compared_in_float32_and_that_is_said() -> None:
    found = verdicts(Run(model=lambda: Net(OnlyFloat32)), "cuts 2", "cuts ragged")
    assert found["cuts 2"].holds and found["cuts ragged"].holds
    assert "not in float64" in found["cuts 2"].note and "OnlyFloat32 is for float32" in found["cuts 2"].note


def test_steps_that_take_the_sign_of_rounding_are_compared_by_their_gradient() -> None:
    lion = Run(model=lambda: Net(Unused), optimizer=lambda model: torch.optim.Rprop(model.parameters()))
    found = verdicts(lion, "cuts 2", "cuts 4")
    assert [one.holds for one in found.values()] == [True, True], found


@pytest.mark.parametrize("architecture", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_models_of_transformers_cut_unevenly_and_resumed_are_the_same(architecture: str) -> None:
    pytest.importorskip("transformers")
    found = verdicts(of_transformers(architecture), "cuts ragged", "resume", updates=2)
    assert all(verdict.holds for verdict in found.values()), found


class Asks(Classify):
    """Weighs a term by the update's number."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) + 0.1 * self.now.update * output.square().sum()


class ClipsOnce(Hook):
    """Clips the gradient of the update, as it is before the step."""

    def before_step(self, event: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 0.05)


class ResetsUnits(Hook):
    """Writes to weights after the step, by random numbers, which are keyed by the update."""

    def after_update(self, event: Any) -> None:
        with torch.no_grad():
            self.trainer.model.mix.weight[random.randrange(8)] *= 0.5


class NoisyGradients(Hook):
    def before_step(self, event: Any) -> None:
        for one in self.trainer.model.parameters():
            if one.grad is not None:
                one.grad.add_(torch.from_numpy(np.random.randn(*one.shape)).to(one), alpha=1e-2)


@pytest.mark.parametrize(
    "run",
    [
        Run(task=Asks),
        Run(hooks=lambda: [ClipsOnce()]),
        Run(hooks=lambda: [ResetsUnits()]),
        Run(hooks=lambda: [NoisyGradients()]),
    ],
    ids=["asks", "clips once", "units reset", "noise"],
)
def test_what_goes_by_the_update_fails_no_row(run: Run) -> None:
    found = verdicts(run, "cuts 4", "resume")
    assert {name: verdict.holds for name, verdict in found.items()} == {
        "cuts 4": True,
        "resume": True,
    }, found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught_by_its_row_which_names_the_part(name: str) -> None:
    mutant = MUTANTS[name]
    verdict = verdicts(mutant.run, mutant.rows[0], updates=4 if name in NEEDS_FOUR else 3)[mutant.rows[0]]
    assert verdict.holds is False
    assert mutant.part in " ".join(verdict.causes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught_by_every_row_that_it_breaks(name: str) -> None:
    found = verdicts(MUTANTS[name].run)
    assert {row for row, verdict in found.items() if verdict.holds is False} >= set(MUTANTS[name].rows)
