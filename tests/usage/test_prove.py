"""Runs with one fault each: a row fails, and what it says names the fault."""

import pytest
from prove_mutants import MUTANTS, Run

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
