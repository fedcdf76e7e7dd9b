"""A run over a stream that is left and taken up has the samples and bits of the run that was left alone.

`make test` runs the rows that are not `slow`; `make streams` runs all with torchdata and `datasets` themselves.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import streams_programs as programs
from launched import Failed, on_ranks

Leaving = Literal["mid-epoch", "epoch border", "second epoch", "exception", "skip", "rewind"]


@dataclass(frozen=True)
class Row:
    """One use of a stream.

    Args:
        stream: by its name in `streams_programs`.
        ranks: on how many it is begun.
        resumed_on: on how many it is taken up; as many by default.
        leaving: how it is left.
        strategy: between several ranks.
        needs: a package that is not in the `dev` extra.
        slow: whether `make test` leaves it out.
    """

    stream: str
    ranks: int = 1
    resumed_on: int | None = None
    leaving: Leaving = "mid-epoch"
    strategy: str = "ordered"
    needs: str = ""
    slow: bool = False

    def __str__(self) -> str:
        on = f"{self.ranks}" if self.resumed_on is None else f"{self.ranks} to {self.resumed_on}"
        return f"{self.stream}, {on} ranks, {self.leaving}" + (f", {self.strategy}" if self.ranks > 1 else "")


LEAVINGS: tuple[Leaving, ...] = ("mid-epoch", "epoch border", "second epoch", "exception", "skip", "rewind")

OWN = [
    *(Row("counting", leaving=one, slow=one not in ("second epoch", "exception")) for one in LEAVINGS),
    *(Row("uneven", 2, leaving=one, slow=one != "mid-epoch") for one in LEAVINGS),
    *(Row("uneven", 2, leaving=one, strategy="fsdp", slow=True) for one in LEAVINGS),
    *(Row("unlike", 2, leaving=one, slow=one != "exception") for one in LEAVINGS),
    *(Row("unlike", 2, leaving=one, strategy="zero1", slow=True) for one in ("mid-epoch", "exception")),
    Row("empty_on_rank_1", 2, leaving="second epoch", slow=True),
    Row("augmenting"),
    Row("augmenting", 2, leaving="second epoch", slow=True),
    Row("shared", 2, resumed_on=1),
    Row("shared", 1, resumed_on=2, leaving="second epoch", slow=True),
    Row("updates", 2, resumed_on=1, leaving="epoch border", slow=True),
    Row("late_state", slow=True),
]

LOADERS = ("loader_of_map", "loader_of_map_shuffled", "loader_of_iterable")
WORKERS = ("workers_of_map", "workers_of_map_shuffled", "workers_that_persist", "workers_of_iterable")

TORCHDATA = [
    *(Row(one, leaving=how, needs="torchdata", slow=True) for one in LOADERS + WORKERS for how in LEAVINGS),
    *(Row(one, 2, needs="torchdata", slow=True) for one in LOADERS + WORKERS),
]

DATASETS = [
    *(Row("hf_map", leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row("hf_map", 2, resumed_on=1, leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row("hf_streaming", leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row("hf_split_by_node", 2, leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
]

REFUSED = [  # on another number of ranks
    Row("uneven", 2, resumed_on=1),
    Row("unlike", 1, resumed_on=2, slow=True),
    Row("loader_of_map_shuffled", 2, resumed_on=1, needs="torchdata", slow=True),
    *(Row("hf_split_by_node", 2, resumed_on=ranks, needs="datasets", slow=True) for ranks in (1, 3)),
]

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
    params: list[Any] = []
    for row in rows:
        missing = bool(row.needs) and find_spec(row.needs) is None
        marks = [pytest.mark.skipif(missing, reason=f"needs {row.needs}: pip install 'evenstep[streams]'")]
        params.append(pytest.param(row, id=str(row), marks=[*marks, pytest.mark.slow] if row.slow else marks))
    return params


def _run(row: Row, folder: Path, what: str = "", *, ranks: int | None = None, **options: Any) -> list[Any]:
    return on_ranks(ranks or row.ranks, programs.train, str(folder), row.stream, row.strategy, what, options)


@pytest.mark.parametrize("row", _params([*OWN, *TORCHDATA, *DATASETS]))
def test_a_run_that_is_left_and_taken_up_has_the_samples_and_bits_of_the_run_left_alone(
    row: Row, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("row", _params(REFUSED))
def test_a_stream_of_its_own_state_does_not_resume_on_other_ranks(row: Row, tmp_path: Path) -> None:
    results = _run(row, tmp_path, stop_at=2)
    assert not any(isinstance(one, Failed) for one in results), results
    results = _run(row, tmp_path, ranks=row.resumed_on, resume=True)
    assert all(isinstance(one, Failed) and "CheckpointError" in one for one in results), results
