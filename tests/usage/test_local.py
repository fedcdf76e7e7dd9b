"""Ranks that step alone, as processes: a run that is left in the midst of a period goes on with the same bits."""

from pathlib import Path

import local_programs as programs
import pytest
from launched import on_ranks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "ranks", "options", "stops"),
    [
        ("streaming DiLoCo", 2, {"precision": "16-mixed"}, [3, 6]),
        pytest.param("streaming DiLoCo", 2, {}, [3, 6], marks=SLOW),
        pytest.param("streaming DiLoCo", 3, {"ordered": True, "precision": "bf16-true"}, [5, 7, 8, 9], marks=SLOW),
        pytest.param("SlowMo", 3, {"precision": "bf16-true-no-master"}, [1, 2, 5, 6], marks=SLOW),
        pytest.param("SlowMo", 2, {"precision": "bf16-mixed", "ordered": True}, [3, 10, 13], marks=SLOW),
        pytest.param("local SGD", 4, {"precision": "bf16-true"}, [2, 4, 7], marks=SLOW),
        pytest.param("SlowMo", 3, {"precision": "16-true"}, [1, 3, 6, 11], marks=SLOW),
        pytest.param("local SGD", 2, {"precision": "16-true-no-master", "ordered": True}, [2, 5], marks=SLOW),
    ],
)
def test_a_run_goes_on_where_it_was_with_the_same_bits(
    tmp_path: Path, name: str, ranks: int, options: dict[str, object], stops: list[int]
) -> None:
    found = on_ranks(ranks, programs.goes_on, str(tmp_path), name, options, stops)
    assert all(isinstance(one, list) for one in found), found
    assert all(set(theirs) == {theirs[0]} for theirs in found)  # stopped or not
    assert len({state for theirs in found for state, _, _ in theirs}) == 1  # of all ranks
    assert len({loss for theirs in found for _, _, loss in theirs}) == 1
    assert len({own for theirs in found for _, own, _ in theirs}) == ranks  # each has gone on by itself


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("streaming DiLoCo", {"precision": "16-mixed"}, marks=SLOW),
        pytest.param("SlowMo", {"precision": "bf16-true"}, marks=SLOW),
        pytest.param("local SGD", {"precision": "16-true-no-master", "ordered": True}, marks=SLOW),
    ],
)
def test_replicas_in_stages_left_in_the_midst_of_a_period_end_at_the_bits_of_whole_ones(
    tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    whole = on_ranks(2, programs.goes_on, str(tmp_path / "whole"), name, options, [])
    staged = on_ranks(4, programs.goes_on, str(tmp_path / "staged"), name, {**options, "pipeline": 2}, [6])
    assert all(isinstance(one, list) for one in (*whole, *staged)), (whole, staged)
    state, _, valid = whole[0][0]
    assert all(ends == [ends[0]] * 2 and ends[0][2][:2] == valid[:2] for ends in staged)
    assert staged[0][0][0] == state
