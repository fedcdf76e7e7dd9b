"""FSDP2 over two real processes; what each check does is in `sharded_checks`."""

from collections.abc import Callable
from typing import Any

import pytest

WANTED: dict[str, Any] = {
    "clipped_large_and_odd_tensors_have_the_bits_of_one_process": True,
    "a_head_without_work_keeps_parameters_and_state": [True, False],
    "a_rank_without_work_changes_nothing": [True, True],
    "a_dummy_pass_can_be_told_and_leaves_no_trace": [[[0, 3, 0], [3, 0, 3]], True],
    "a_rank_without_work_beside_one_with_several_passes": True,
    "non_finite_numbers_of_an_unseen_pass_reach_nobody": [1, True],
    "an_update_that_raised_on_all_ranks_leaves_nothing_behind": [True, True],
    "sixteen_bit_parameters_train": [True, ["torch.float32"]],
    "state_of_an_optimizer_that_has_stepped_is_cut": [True, True],
    "several_tasks_whose_heads_are_gathered_one_by_one": [True, True, True],
    "methods_and_learned_coefficients_are_those_of_one_process": [],
    "a_late_weight_beside_others_is_divided": [True, True],
    "memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient": [3, []],
    "an_update_of_three_tasks_reduces_each_unit_once": 4,
    "what_a_task_trains_is_that_of_one_process": [],
}


@pytest.fixture
def found(found_by: Callable[..., Any]) -> dict[str, Any]:
    return found_by("sharded_checks.py", 2, *WANTED)


@pytest.mark.parametrize("check", WANTED)
def test_on_two_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
