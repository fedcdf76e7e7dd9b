"""Runs with one fault each: a row fails, and what it says names the fault."""

import pytest
import torch
from prove_mutants import MUTANTS, Net, OnlyFloat32, Run, Unused, of_transformers

from evenstep.extras.prove.rows import Prover, Verdict


def verdicts(run: Run, *rows: str, updates: int = 4) -> dict[str, Verdict]:
    """What rows say of a run, all of them by default."""
    made = Prover(run.bench(updates)).rows()
    return {row.name: row.run() for row in made if not rows or row.name in rows}


def test_a_sound_run_fails_no_row_and_its_loop_by_hand_gives_the_same() -> None:
    found = verdicts(Run())
    assert {name for name, verdict in found.items() if verdict.holds} >= {
        *("loss", "again", "cuts 2", "cuts 4", "cuts ragged", "optimizer", "format 32-true", "resume"),
    }
    assert not [name for name, verdict in found.items() if verdict.holds is False]


def test_a_model_that_is_not_for_float64_is_compared_in_float32_and_that_is_said() -> None:
    found = verdicts(Run(model=lambda: Net(OnlyFloat32)), "cuts 2", "cuts ragged", "format 32-true", "optimizer")
    assert found["cuts 2"].holds and found["cuts ragged"].holds and found["format 32-true"].holds
    assert "float32" in found["cuts 2"].measure and "OnlyFloat32 is for float32" in found["cuts 2"].note
    assert found["optimizer"].holds is None


def test_steps_that_take_the_sign_of_rounding_are_compared_by_their_gradient() -> None:
    lion = Run(model=lambda: Net(Unused), optimizer=lambda model: torch.optim.Rprop(model.parameters()))
    found = verdicts(lion, "cuts 2", "cuts 4")
    assert [one.holds for one in found.values()] == [True, True], found


@pytest.mark.parametrize("architecture", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_models_of_transformers_cut_unevenly_by_hand_and_resumed_are_the_same(architecture: str) -> None:
    pytest.importorskip("transformers")
    found = verdicts(of_transformers(architecture), "cuts ragged", "optimizer", "resume", updates=2)
    assert all(verdict.holds for verdict in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_models_of_transformers_fail_no_row_at_all(architecture: str) -> None:
    pytest.importorskip("transformers")
    found = verdicts(of_transformers(architecture))
    assert not [name for name, verdict in found.items() if verdict.holds is False], found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught_by_the_row_that_is_about_it_and_named(name: str) -> None:
    mutant = MUTANTS[name]
    verdict = verdicts(mutant.run, mutant.rows[0], updates=4 if "hook" in name else 3)[mutant.rows[0]]
    assert verdict.holds is False
    said = " ".join(verdict.causes)
    assert all(word in said for word in mutant.named), said


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_caught_by_every_row_that_it_breaks(name: str) -> None:
    found = verdicts(MUTANTS[name].run)
    assert {row for row, verdict in found.items() if verdict.holds is False} >= set(MUTANTS[name].rows)


def test_there_are_twenty_faults_and_more() -> None:
    assert len(MUTANTS) >= 20
