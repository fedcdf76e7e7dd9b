"""FSDP2 and ZeRO 1 under a pipeline, over four real processes; what each check does is in `staged_shards_checks`."""

from collections.abc import Callable
from typing import Any

import pytest

WANTED: dict[str, Any] = {
    "shards_have_the_bits_of_one_process": [True] * 4,
    "tied_shards_have_the_bits_of_one_process": [True, True],
    "fast_sums_are_equal_up_to_rounding": [True] * 3,
    "copies_of_shards_are_one_replica_each": [True, True],
    "a_replica_without_work_takes_part": [True, True],
    "sixteen_bit_parameters_train": [True] * 3,
    "metrics_and_evaluations_are_those_of_one_process": True,
    "a_checkpoint_in_shards_goes_on_anywhere": [4, True],
    "heads_without_work_keep_their_bits": True,
    "memory_that_runs_out_in_a_stage_in_shards_changes_no_gradient": True,
    "a_model_without_stages_is_refused_the_ranks_of_one_column": True,
    "a_fused_optimizer_is_refused_where_bits_must_be_equal": True,
}


@pytest.fixture
def found(found_by: Callable[..., Any]) -> dict[str, Any]:
    return found_by("staged_shards_checks.py", 4, *WANTED)


@pytest.mark.parametrize("check", WANTED)
def test_on_four_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
