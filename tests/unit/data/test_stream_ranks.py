import functools
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Barrier, Lock

import pytest

from evenstep.data import GlobalBatch, Position, ReadOptions, StreamData, UpdateData
from evenstep.errors import ArgumentError, DataError
from refused import refused


class Summing:
    """Sums lists of numbers over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._lock = Barrier(ranks, timeout=5), Lock()
        self._sums: list[float] = []
        self._given = 0

    def __call__(self, values: Sequence[float]) -> list[float]:
        with self._lock:
            self._sums = [sum(pair) for pair in zip(self._sums or [0.0] * len(values), values, strict=True)]
        self._barrier.wait()
        sums = list(self._sums)
        if self._barrier.wait() == 0:
            self._sums = []
        self._barrier.wait()
        return sums


def together(data: Sequence[StreamData | UpdateData], count: int, start: Position | None = None) -> list[object]:
    """The first `count` global batches of each rank, or what it raised."""
    total = Summing(len(data))

    def read(rank: int) -> object:
        options = {"seed": 1, "rank": rank, "ranks": len(data), "total": total}
        try:
            return list(islice(data[rank].batches(ReadOptions(start=start or Position(), **options)), count))
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(len(data)) as pool:
        return list(pool.map(read, range(len(data))))


class Counting:
    def __init__(self, first: int, length: int) -> None:
        self.first, self.length, self.next = first, length, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.first + self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def stream(first: int, length: int) -> StreamData:
    return StreamData(Counting(first, length), global_batch_size=4, micro_batch_size=2, collate=list)


def samples(batches: Sequence[GlobalBatch]) -> list[list[int]]:
    return [[sample for one in batch.microbatches for sample in one.data] for batch in batches]


def test_an_epoch_of_unequal_streams_ends_with_the_longest_and_nothing_is_dropped_or_repeated() -> None:
    first, second = together([stream(0, 7), stream(100, 3)], 5)
    assert samples(first) == [[0, 1], [2, 3], [4, 5], [6], [0, 1]]
    assert samples(second) == [[100, 101], [102], [], [], [100, 101]]
    for rank in (first, second):
        assert [batch.ends_epoch for batch in rank] == [False, False, False, True, False]
        assert [batch.num_samples for batch in rank] == [4, 3, 2, 1, 4]
        assert rank[3].following == rank[4].position == Position(epoch=1)


@pytest.mark.parametrize("stop", range(1, 10))
def test_unequal_streams_resume_at_every_position_each_with_its_own_state(stop: int) -> None:
    lengths = (7, 3)
    undisturbed = together([stream(100 * rank, length) for rank, length in enumerate(lengths)], stop + 6)
    left = [stream(100 * rank, length) for rank, length in enumerate(lengths)]
    position = together(left, stop)[0][-1].following
    taken_up = [stream(100 * rank, length) for rank, length in enumerate(lengths)]
    for before, after in zip(left, taken_up, strict=True):
        after.load_state_dict(before.state_dict(position))
    for rank, batches in enumerate(together(taken_up, 6, position)):
        assert samples(batches) == samples(undisturbed[rank][stop:])
        assert [batch.following for batch in batches] == [batch.following for batch in undisturbed[rank][stop:]]


class Dealt:
    """Items `rank`, `rank + ranks`, … of 0..length-1; its state counts the items of all ranks."""

    global_state = True

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self.length, self.rank, self.ranks, self.given = length, rank, ranks, 0

    def __iter__(self) -> Iterator[int]:
        while self.given + self.rank < self.length:
            self.given += self.ranks
            yield self.given - self.ranks + self.rank
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def dealt(length: int, ranks: int) -> list[StreamData]:
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "collate": list}
    return [StreamData(Dealt(length, rank, ranks), **sizes) for rank in range(ranks)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2)])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_stream_with_global_numbers_resumes_on_another_number_of_ranks(before: int, after: int, stop: int) -> None:
    def of_updates(ranks: list[list[GlobalBatch]]) -> list[list[int]]:
        return [
            sorted(functools.reduce(operator.iadd, (samples([one])[0] for one in of_ranks), []))
            for of_ranks in zip(*ranks, strict=True)
        ]

    first = dealt(21, before)
    position = together(first, stop)[0][-1].following
    second = dealt(21, after)
    for one in second:
        assert one.state.scope == "run"
        one.load_state_dict(first[0].state_dict(position))
    whole = of_updates(together(dealt(21, 1), stop + 5))
    assert of_updates(together(second, 5, position)) == whole[stop:]


def test_ranks_of_a_stream_with_global_numbers_must_take_equally_many() -> None:
    with refused(ArgumentError, "micro_batch_size"):
        dealt(21, 3)[0].batches(ReadOptions(seed=1, ranks=3))


def test_streams_that_all_give_nothing_are_an_error_on_all_ranks() -> None:
    assert all(isinstance(one, str) for one in together([stream(0, 0), stream(0, 0)], 1))


def test_generators_on_all_ranks_end_the_data_and_beside_others_are_an_error_on_all_ranks() -> None:
    def data(once: bool, length: int) -> StreamData:
        some = (number for number in range(length)) if once else range(length)
        return StreamData(some, global_batch_size=4, micro_batch_size=2, collate=list)

    first, second = together([data(True, 5), data(True, 2)], 9)
    assert [len(first), len(second)] == [3, 3]
    told = together([data(True, 2), data(False, 2)], 9)
    assert all(isinstance(one, str) for one in told)


def test_ranks_that_share_a_stream_get_the_micro_batches_of_one_process() -> None:
    def data() -> StreamData:
        return StreamData(Counting(0, 11), global_batch_size=6, micro_batch_size=2, collate=list, shared=True)

    alone = list(islice(data().batches(ReadOptions(seed=1)), 5))
    ranks = together([data(), data()], 5)
    for batch, *of_ranks in zip(alone, *ranks, strict=True):
        assert [one.index for rank in of_ranks for one in rank.microbatches] == list(range(batch.num_microbatches))
        assert [one.data for rank in of_ranks for one in rank.microbatches] == [one.data for one in batch.microbatches]
        assert {(rank.num_samples, rank.num_microbatches, rank.ends_epoch) for rank in of_ranks} == {
            (batch.num_samples, batch.num_microbatches, batch.ends_epoch)
        }


@pytest.mark.parametrize("kind", ["shared", "updates"])
def test_shared_streams_that_differ_are_refused_on_all_ranks_instead_of_waiting(kind: str) -> None:
    def data(length: int) -> StreamData | UpdateData:
        if kind == "updates":
            return UpdateData([[1]] * length, samples_in=len)
        return StreamData([1] * length, global_batch_size=2, micro_batch_size=1, collate=list, shared=True)

    told = together([data(4), data(6)], 9)
    assert all(isinstance(one, str) for one in told)


def test_that_ranks_read_the_same_items_from_streams_that_should_differ_is_said_once() -> None:
    for rank in together([stream(0, 8), stream(0, 8)], 6):
        said = [fault.message for batch in rank for fault in batch.faults]
        assert len(said) == 1 and "have read the same first items" in said[0] and "`data.shared = true`" in said[0]
    assert not any(batch.faults for rank in together([stream(0, 8), stream(100, 8)], 6) for batch in rank)
