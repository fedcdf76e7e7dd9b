"""Shards and models of transformers over real processes; what each does is in the modules of checks."""

from itertools import product
from pathlib import Path

import hf_checks
import partial_resume_checks
import sharded_checks
import staged_shards_checks
from launched import on_ranks


def test_shards_of_two_processes_are_exact_whatever_a_rank_has_to_do() -> None:
    first, second = on_ranks(2, sharded_checks.found, timeout_s=240)
    assert first == {
        "clipped_large_and_odd_tensors_have_the_bits_of_one_process": True,
        "a_head_without_work_keeps_parameters_and_state": (True, False),
        "a_dummy_pass_can_be_told_and_leaves_no_trace": ([(0, 3, 0), (3, 0, 3)], True),
        "a_rank_without_work_beside_one_with_several_passes": True,
        "non_finite_numbers_of_an_unseen_pass_reach_nobody": (1, True),
        "an_update_that_raised_on_all_ranks_leaves_nothing_behind": [True, True],
        "methods_and_learned_coefficients_are_those_of_one_process": [],
        "memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient": (2, True),
        "state_of_an_optimizer_that_has_stepped_is_cut": [True, True],
        "what_a_task_trains_is_that_of_one_process": (0.0, 0.0, 0.0, True),
        "shards_predict_what_one_process_does": (True, True),
    }, second


def test_heads_without_work_keep_their_bits_in_stages_of_shards() -> None:
    found, *others = on_ranks(4, staged_shards_checks.found, timeout_s=240)
    assert isinstance(found, dict), (found, others)
    assert found["four"] == found["one"]


def test_ranks_read_what_they_hold_and_damage_that_one_reads_is_known_to_all(tmp_path: Path) -> None:
    found, other = on_ranks(2, partial_resume_checks.found, str(tmp_path), timeout_s=240)
    assert isinstance(found, list), (found, other)
    held, newest, damaged = found
    ways = product([*partial_resume_checks.WAYS, "stages"], ("one process", "fsdp", "zero1"))
    assert held == {f"{way} from {source}": [True, True] for way, source in ways}
    assert newest == [(True, "step-00000003", 3, []), (True, "step-00000002", 2, ["00000000-checkpoint.txt"])]
    assert damaged == [(True, True, 0), (True, True, 0), 2]


def test_two_ranks_have_the_parameters_of_one(tmp_path: Path) -> None:
    apart, other = on_ranks(2, hf_checks.found, str(tmp_path), timeout_s=240)
    assert isinstance(apart, dict), (apart, other)
    assert len(apart) == 10
    assert {name: far for name, far in apart.items() if far >= 1e-12} == {}
