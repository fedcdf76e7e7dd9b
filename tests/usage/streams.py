"""The battery of streams as data: which stream, on how many ranks, how it is left and taken up, and what then holds.

    exact       the samples seen and the bits of the model are those of the run that was left alone
    refused     said when the run is built, or when it is resumed; `says` is in the message

`make test` runs the rows that are not `slow`: they need neither `datasets` nor torchdata, but the stand-ins of
`streams_programs`, which keep the same states. `make streams` runs all rows with the libraries themselves.
"""

from dataclasses import dataclass
from typing import Literal

Leaving = Literal["mid-epoch", "epoch border", "second epoch", "exception", "skip", "rewind"]
Outcome = Literal["exact", "refused"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One use of a stream.

    Args:
        stream: a function of `streams_programs`, by name.
        ranks: on how many it is begun.
        resumed_on: on how many it is taken up; as many by default.
        leaving: how it is left.
        strategy: between several ranks.
        outcome: what holds then.
        says: part of the message.
        needs: a package that is not in the `dev` extra.
        slow: whether `make test` leaves it out.
    """

    stream: str
    ranks: int = 1
    resumed_on: int | None = None
    leaving: Leaving = "mid-epoch"
    strategy: str = "ordered"
    outcome: Outcome = "exact"
    says: str = ""
    needs: str = ""
    slow: bool = False

    def __str__(self) -> str:
        on = f"{self.ranks}" if self.resumed_on is None else f"{self.ranks} to {self.resumed_on}"
        return f"{self.stream}, {on} ranks, {self.leaving}" + (f", {self.strategy}" if self.ranks > 1 else "")


LEAVINGS: tuple[Leaving, ...] = ("mid-epoch", "epoch border", "second epoch", "exception", "skip", "rewind")

OWN = [
    *(Row(stream="counting", leaving=one, slow=one not in ("second epoch", "exception")) for one in LEAVINGS),
    *(Row(stream="uneven", ranks=2, leaving=one, slow=one != "mid-epoch") for one in LEAVINGS),
    *(Row(stream="uneven", ranks=2, leaving=one, strategy="fsdp", slow=True) for one in LEAVINGS),
    *(Row(stream="unlike", ranks=2, leaving=one, slow=one != "exception") for one in LEAVINGS),
    *(Row(stream="unlike", ranks=2, leaving=one, strategy="zero1", slow=True) for one in ("mid-epoch", "exception")),
    Row(stream="empty_on_rank_1", ranks=2, leaving="second epoch", slow=True),
    Row(stream="augmenting"),
    Row(stream="augmenting", ranks=2, leaving="second epoch", slow=True),
    Row(stream="shared", ranks=2, resumed_on=1),
    Row(stream="shared", ranks=1, resumed_on=2, leaving="second epoch", slow=True),
    Row(stream="updates", ranks=2, resumed_on=1, leaving="epoch border", slow=True),
    Row(stream="late_state", slow=True),
    Row(stream="uneven", ranks=2, resumed_on=1, outcome="refused", says="streams of 2 ranks are, but this run has 1"),
    Row(
        stream="unlike",
        ranks=1,
        resumed_on=2,
        outcome="refused",
        says="streams of 1 rank are, but this run has 2",
        slow=True,
    ),
]

_LOADERS = ("loader_of_map", "loader_of_map_shuffled")
_ITERABLES = ("loader_of_iterable",)
_WORKERS = ("workers_of_map", "workers_of_map_shuffled", "workers_that_persist", "workers_of_iterable")

TORCHDATA = [
    *(Row(stream=one, leaving=how, needs="torchdata", slow=True) for one in _LOADERS + _ITERABLES for how in LEAVINGS),
    *(Row(stream=one, ranks=2, needs="torchdata", slow=True) for one in _LOADERS + _ITERABLES),
    *(Row(stream=one, leaving=how, needs="torchdata", slow=True) for one in _WORKERS for how in LEAVINGS),
    *(Row(stream=one, ranks=2, needs="torchdata", slow=True) for one in _WORKERS),
    Row(
        stream="loader_of_map_shuffled",
        ranks=2,
        resumed_on=1,
        outcome="refused",
        says="streams of 2 ranks are, but this run has 1",
        needs="torchdata",
        slow=True,
    ),
]


DATASETS = [
    *(Row(stream="hf_map", leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row(stream="hf_map", ranks=2, resumed_on=1, leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row(stream="hf_streaming", leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(Row(stream="hf_split_by_node", ranks=2, leaving=how, needs="datasets", slow=True) for how in LEAVINGS),
    *(
        Row(
            stream="hf_split_by_node",
            ranks=2,
            resumed_on=ranks,
            outcome="refused",
            says=f"streams of 2 ranks are, but this run has {ranks}",
            needs="datasets",
            slow=True,
        )
        for ranks in (1, 3)
    ),
]

ROWS = [*OWN, *TORCHDATA, *DATASETS]
