"""Schedules and what belongs to them on several ranks."""

import pytest
import schedules_programs
from launched import on_ranks


@pytest.mark.slow
def test_a_rate_is_found_on_ranks_as_in_one_process_and_leaves_no_trace() -> None:
    alone, _ = schedules_programs.found("single")["single"]
    for result in on_ranks(2, schedules_programs.found, "ddp", "zero1", "fsdp"):
        for strategy, (losses, is_same) in result.items():
            assert is_same, strategy
            assert losses == pytest.approx(alone, rel=1e-9), strategy
