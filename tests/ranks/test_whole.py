"""Whole models out of shards, over two real processes; what each check does is in `whole_checks`."""

from collections.abc import Callable
from typing import Any

import pytest

WANTED: dict[str, Any] = {
    "what_is_generated_on_shards_is_that_of_a_plain_model_for_every_cut": [],
    "evaluations_between_updates_change_no_bit": [True, True, 4, True],
    "a_rank_that_runs_out_of_memory_generates_in_parts": [True, True],
    "a_mean_teacher_of_shards_has_the_bits_of_one_process": [[True, True], [True, True]],
    "a_teacher_is_asked_in_predictions_and_nowhere_outside": [[0.0, 0.0, 0.0], True],
    "the_teacher_of_the_first_update_gives_what_the_model_gives": [12, True],
    "what_tasks_make_of_batches_and_outputs_is_that_of_one_process": [[True] * 5] * 3,
    "a_rank_without_memory_for_the_whole_model_says_so": True,  # the last: the ranks have parted then
}


@pytest.fixture
def found(found_by: Callable[..., Any]) -> dict[str, Any]:
    return found_by("whole_checks.py", 2, *WANTED)


@pytest.mark.parametrize("check", WANTED)
def test_on_two_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
