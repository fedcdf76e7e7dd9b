"""FSDP2 over two real processes; what each check does is in `sharded_checks`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WANTED: dict[str, Any] = {
    "a_head_without_work_keeps_parameters_and_state": [True, False],
    "a_head_that_one_rank_uses_gets_its_exact_gradient": True,
    "a_rank_without_work_changes_nothing": [True, True],
    "non_finite_numbers_of_an_unseen_pass_reach_nobody": [1, True],
    "an_update_that_raised_on_all_ranks_leaves_nothing_behind": [True, True],
    "the_average_and_the_evaluation_see_whole_parameters": [True, True],
    "training_goes_on_with_whole_parameters_after_an_evaluation": True,
    "sixteen_bit_parameters_train": [True, ["torch.float32"]],
    "state_of_an_optimizer_that_has_stepped_is_cut": [True, True],
    "several_tasks_whose_heads_are_gathered_one_by_one": [True, True, True],
    "methods_and_learned_coefficients_are_those_of_one_process": [],
    "a_task_that_is_not_finite_is_dropped_from_shards": [True, True],
    "late_weights_beside_others_are_divided": [True, True],
    "memory_that_runs_out_in_one_of_several_tasks_changes_no_gradient": [18, []],
    "an_update_of_three_tasks_reduces_each_unit_once": 4,
    "a_fused_optimizer_is_refused_where_bits_must_be_equal": True,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    command = [sys.executable, str(Path(__file__).with_name("sharded_checks.py")), *WANTED]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said[0][1].decode() + said[1][1].decode()
    return json.loads(said[0][0])


@pytest.mark.parametrize("check", WANTED)
def test_on_two_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
