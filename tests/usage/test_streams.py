"""The battery of streams: a run that is left and taken up is the run that was left alone."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import streams_programs as programs
from launched import Failed, on_ranks
from streams import ROWS, Row

_WHAT = {"exception": "fails", "skip": "skips", "rewind": "rewinds"}
_STOP_AT = {
    "mid-epoch": 2,
    "epoch border": 3,
    "second epoch": 5,
    "skip": 7,
    "exception": 0,
    "rewind": 0,
}  # an epoch of one rank has 3 updates


def _params(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=str(row), marks=[pytest.mark.slow] if row.slow else []) for row in rows]


def _run(row: Row, folder: Path, what: str = "", *, ranks: int | None = None, **options: Any) -> list[Any]:
    return on_ranks(ranks or row.ranks, programs.train, str(folder), row.stream, row.strategy, what, options)


@pytest.mark.parametrize("row", _params([row for row in ROWS if row.outcome == "exact"]))
def test_a_run_that_is_left_and_taken_up_has_the_samples_and_bits_of_the_run_left_alone(
    row: Row, tmp_path: Path
) -> None:
    if row.needs and find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}: pip install 'evenstep[streams]'")
    what = _WHAT.get(row.leaving, "")
    stop_at = _STOP_AT.get(row.leaving, 0)
    if stop_at and row.leaving != "skip" and row.stream in ("uneven", "unlike", "empty_on_rank_1"):
        stop_at += 3  # an epoch of two ranks has 6 updates
    alone = _run(row, tmp_path / "alone", what if what == "skips" else "")
    first = _run(row, tmp_path / "left", what, stop_at=stop_at)
    parts = [first]
    if row.leaving != "rewind":
        parts.append(_run(row, tmp_path / "left", ranks=row.resumed_on, resume=True))
    for part in parts:
        assert not any(isinstance(one, Failed) for one in part), part
    last = parts[-1]
    assert {one["model"] for one in last} == {one["model"] for one in alone}
    assert {one["progress"] for one in last} == {one["progress"] for one in alone}
    if row.leaving in ("exception", "rewind"):  # in which some samples were seen twice
        return
    if row.resumed_on is None:
        for undisturbed, before, after in zip(alone, first, last, strict=True):
            assert before["seen"] + after["seen"] == undisturbed["seen"]
    else:
        together = sorted(sample for one in first + last for sample in one["seen"])
        assert together == sorted(sample for one in alone for sample in one["seen"])


@pytest.mark.parametrize("row", _params([row for row in ROWS if row.outcome != "exact"]))
def test_a_stream_that_can_not_resume_is_refused(row: Row, tmp_path: Path) -> None:
    if row.needs and find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}: pip install 'evenstep[streams]'")
    results = _run(row, tmp_path, stop_at=2)
    if row.resumed_on is not None:
        assert not any(isinstance(one, Failed) for one in results), results
        results = _run(row, tmp_path, ranks=row.resumed_on, resume=True)
    assert all(isinstance(one, Failed) and row.says in one for one in results), results
