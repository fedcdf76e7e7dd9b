"""FSDP2 and ZeRO 1 under a pipeline, over four real processes; what each check does is in `staged_shards_checks`."""

from collections.abc import Callable
from typing import Any

import pytest

WANTED: dict[str, Any] = {
    "sixteen_bit_parameters_train": [True, True],
    "heads_without_work_keep_their_bits": True,
    "a_model_without_stages_is_refused_the_ranks_of_one_column": True,
}


@pytest.fixture
def found(found_by: Callable[..., Any]) -> dict[str, Any]:
    return found_by("staged_shards_checks.py", 4, *WANTED)


@pytest.mark.parametrize("check", WANTED)
def test_on_four_processes(found: dict[str, Any], check: str) -> None:
    assert found[check] == WANTED[check]
