"""Norms of gradients and parameters are those of one process, on every layout of ranks."""

from typing import Any

import norms_programs as programs
import pytest
from launched import Failed, on_ranks


def _same(found: list[Any], alone: dict[str, list[float]]) -> None:
    assert not any(isinstance(one, Failed) for one in found), found
    for one in found:
        for name, values in one.items():
            assert values == pytest.approx(alone[name], rel=1e-9), name
    assert found[0].keys() == alone.keys()


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    [found] = on_ranks(1, programs.metrics_of, "single")
    assert not isinstance(found, Failed), found
    return found


@pytest.mark.parametrize(("strategy", "ranks", "pipeline"), [("fsdp", 2, 1), ("hybrid", 4, 1), ("fsdp", 4, 2)])
def test_a_parameter_that_is_a_single_number_counts_once_in_the_norm_that_is_clipped(
    strategy: str, ranks: int, pipeline: int, alone: dict[str, list[float]]
) -> None:
    _same(on_ranks(ranks, programs.metrics_of, strategy, pipeline), alone)


@pytest.mark.parametrize("strategy", ["fsdp", "ordered-fsdp"])
def test_a_parameter_that_is_a_single_number_counts_once_where_tasks_gradients_are_combined(strategy: str) -> None:
    [alone] = on_ranks(1, programs.metrics_of, "single", 1, True)
    _same(on_ranks(2, programs.metrics_of, strategy, 1, True), alone)


def test_one_trainer_after_another_makes_no_new_connections_between_ranks() -> None:
    for counts in on_ranks(4, programs.connections_of_three_trainers):
        assert not isinstance(counts, Failed), counts
        assert len(set(counts)) == 1, counts
