"""A resume reads what each rank holds and no more, over two processes; the checks are in `partial_resume_checks`."""

import json
import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

WAYS = ("fsdp", "ordered fsdp", "zero1", "fsdp in copies")
SOURCES = ("one process", "fsdp", "zero1")
WANTED: dict[str, Any] = {
    "each_rank_reads_what_it_holds": {f"{way} from {source}": [True, True] for way, source in product(WAYS, SOURCES)},
    "each_stage_reads_its_own_layers": [[True, True]] * 3,
    "damage_that_one_rank_reads_is_an_error_on_all_and_changes_nothing": [[True, True, 0], [True, True, 0], 2],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    script, folder = Path(__file__).with_name("partial_resume_checks.py"), tmp_path_factory.mktemp("runs")
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), *WANTED],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], b"".join(errors for _, errors in said).decode()
    return json.loads(said[0][0].splitlines()[-1])


@pytest.mark.parametrize("check", WANTED)
def test_on_two_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
