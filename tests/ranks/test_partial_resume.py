"""A resume reads what each rank holds and no more, over two processes; the checks are in `partial_resume_checks`."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

WAYS = ("fsdp", "ordered fsdp", "zero1", "fsdp in copies")
SOURCES = ("one process", "fsdp", "zero1")
WANTED: dict[str, Any] = {
    "each_rank_reads_what_it_holds": {f"{way} from {source}": [True, True] for way, source in product(WAYS, SOURCES)},
    "each_stage_reads_its_own_layers": [[True, True]] * 3,
    "the_newest_is_read_once_by_each_and_after_damage_the_older_one": [
        [True, True, "step-00000003", 3, []],
        [True, True, "step-00000002", 2, ["00000000-checkpoint.txt"]],
    ],
    "damage_that_one_rank_reads_is_an_error_on_all_and_changes_nothing": [[True, True, 0], [True, True, 0], 2],
}


@pytest.fixture
def found(found_by: Callable[..., Any]) -> dict[str, Any]:
    return found_by("partial_resume_checks.py", 2, *WANTED)


@pytest.mark.parametrize("check", WANTED)
def test_on_two_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
