"""FSDP2 and ZeRO 1 under a pipeline, over four real processes; what each check does is in `staged_shards_checks`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
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
    "heads_without_work_keep_their_bits": [*[True] * 8, False],
    "memory_that_runs_out_in_a_stage_in_shards_changes_no_gradient": True,
    "a_fused_optimizer_is_refused_where_bits_must_be_equal": True,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    script, folder = Path(__file__).with_name("staged_shards_checks.py"), tmp_path_factory.mktemp("runs")
    common = os.environ | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), *WANTED],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * 4, b"".join(errors for _, errors in said).decode()
    return json.loads(said[0][0])


@pytest.mark.parametrize("check", WANTED)
def test_on_four_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
