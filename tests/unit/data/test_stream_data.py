"""Streams of samples, of batches and of updates, on one rank and on several."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import GlobalBatch, Position, ReadOptions, StreamData, UpdateData
from evenstep.errors import DataError


class Counting:
    """A stream with a state: `length` numbers an epoch, which differ from epoch to epoch."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first, self.epoch, self.next = length, first, 0, 0
        self.given: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.length:
            number = self.first + 100 * self.epoch + self.next
            self.next += 1
            self.given.append(number)
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]


class Stale(Counting):
    """Its state is that of the item given last, also right after another one was loaded."""

    told: Mapping[str, int] = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.told = {"next": self.next}
            yield number

    def state_dict(self) -> dict[str, int]:
        return dict(self.told)


class Dealt(Counting):
    """Items `rank`, `rank + ranks`, … of 0..length-1; its state counts the items of all ranks."""

    global_state = True

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        super().__init__(length)
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        while self.next + self.rank < self.length:
            self.next += self.ranks
            yield self.next - self.ranks + self.rank
        self.next = 0


def by_samples(stream: object, global_batch_size: int, **options: object) -> StreamData:
    return StreamData(stream, global_batch_size=global_batch_size, collate=list, **options)


def taken(data: Any, count: int, start: Position | None = None, **read: Any) -> list[GlobalBatch]:
    return list(islice(data.batches(ReadOptions(start=start or Position(), **{"seed": 1, **read})), count))


def samples(batches: Sequence[GlobalBatch]) -> list[list[int]]:
    return [[sample for one in batch.microbatches for sample in one.data] for batch in batches]


Together = Callable[..., list[Any]]


@pytest.fixture
def together(on_ranks: Any) -> Together:
    """The first `count` global batches of each rank, or the message of its error."""

    def run(data: Sequence[StreamData], count: int, start: Position | None = None) -> list[Any]:
        def read(group: Any) -> object:
            try:
                return taken(data[group.rank], count, start, rank=group.rank, ranks=group.ranks, total=group.sum_floats)
            except DataError as error:
                return str(error)

        return on_ranks(len(data), read)

    return run


def test_ready_made_batches_are_grouped_and_the_last_group_may_be_short() -> None:
    ready = [torch.full((size,), float(size)) for size in (3, 5, 2, 4, 1)]
    batches = taken(StreamData(ready, batched=True, num_microbatches=2), 4)
    assert [batch.num_samples for batch in batches] == [8, 6, 1, 8]
    assert [batch.num_microbatches for batch in batches] == [2, 2, 1, 2]
    assert [batch.ends_epoch for batch in batches] == [False, False, True, False]
    assert batches[1].microbatches[1].data is ready[3]


@given(
    length=st.integers(1, 12),
    sizes=st.sampled_from([(1, None), (2, 1), (3, 2), (5, None)]),
    skip=st.integers(1, 20),
    kind=st.sampled_from([Counting, Stale]),
)
def test_a_stream_with_state_resumes_at_every_position_without_replay(
    length: int, sizes: tuple[int, int | None], skip: int, kind: type[Counting]
) -> None:
    def data(stream: Counting) -> StreamData:
        return by_samples(stream, sizes[0], micro_batch_size=sizes[1])

    whole = taken(data(kind(length)), skip + 6)
    first = data(kind(length))
    *_, last = taken(first, skip)
    position = last.following
    state = deepcopy(first.state_dict())
    assert first.state_dict(position) == state
    assert skip == 1 or first.state_dict(last.position)["batch"] == last.position.batch
    stream = kind(length)
    second = data(stream)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.batches(ReadOptions(start=position, seed=1))  # such as to try a batch out
    assert second.state_dict(position) == state
    assert taken(second, 6, position) == whole[skip:]
    # One more is looked ahead at, and two may be needed to learn that the state is that of a new epoch.
    assert len(stream.given) <= sum(batch.num_samples for batch in whole[skip:]) + 3


def test_a_stream_without_state_begins_its_epoch_again_and_says_so_once() -> None:
    data = by_samples(range(5), 2)
    assert (data.positions, data.scope, data.state_dict()) == ("epochs", "run", {})
    first, second, third = taken(data, 3, Position(epoch=1, batch=3))
    assert samples([first, second, third]) == [[0, 1], [2, 3], [4]]
    assert (first.position, third.following) == (Position(epoch=1, batch=3), Position(epoch=2))
    assert len(first.faults) == 1
    assert not second.faults


def stream(first: int, length: int) -> StreamData:
    return by_samples(Counting(length, first), 4, micro_batch_size=2)


def test_an_epoch_ends_with_the_longest_stream_without_dropped_or_repeated_samples(together: Together) -> None:
    first, second = together([stream(0, 7), stream(1000, 3)], 5)
    assert samples(first) == [[0, 1], [2, 3], [4, 5], [6], [100, 101]]
    assert samples(second) == [[1000, 1001], [1002], [], [], [1100, 1101]]
    for rank in (first, second):
        assert [batch.ends_epoch for batch in rank] == [False, False, False, True, False]
        assert [batch.num_samples for batch in rank] == [4, 3, 2, 1, 4]
        assert rank[3].following == rank[4].position == Position(epoch=1)


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_unequal_streams_resume_at_every_position_each_with_its_own_state(stop: int, together: Together) -> None:
    def data() -> list[StreamData]:
        return [stream(1000 * rank, length) for rank, length in enumerate((7, 3))]

    whole = together(data(), stop + 6)
    left, taken_up = data(), data()
    position = together(left, stop)[0][-1].following
    for before, after in zip(left, taken_up, strict=True):
        after.load_state_dict(before.state_dict(position))
    for rank, batches in enumerate(together(taken_up, 6, position)):
        assert samples(batches) == samples(whole[rank][stop:])
        assert [batch.following for batch in batches] == [batch.following for batch in whole[rank][stop:]]


@pytest.mark.parametrize(("before", "after", "stop"), [(2, 4, 1), (4, 1, 3), (1, 2, 2)])
def test_a_stream_with_global_numbers_resumes_on_another_number_of_ranks(
    before: int, after: int, stop: int, together: Together
) -> None:
    def dealt(ranks: int) -> list[StreamData]:
        return [by_samples(Dealt(21, rank, ranks), 8, micro_batch_size=2) for rank in range(ranks)]

    def of_updates(ranks: list[list[GlobalBatch]]) -> list[list[int]]:
        return [sorted(chain(*(samples([one])[0] for one in of_ranks))) for of_ranks in zip(*ranks, strict=True)]

    first, second = dealt(before), dealt(after)
    position = together(first, stop)[0][-1].following
    for one in second:
        assert one.scope == "run"
        one.load_state_dict(first[0].state_dict(position))
    assert of_updates(together(second, 5, position)) == of_updates(together(dealt(1), stop + 5))[stop:]


def test_ranks_fail_together(together: Together) -> None:
    assert all(isinstance(one, str) for one in together([stream(0, 0), stream(0, 0)], 1))
    streams = [by_samples(one, 4, micro_batch_size=2) for one in (iter(range(5)), iter(range(2)))]
    assert [len(rank) for rank in together(streams, 9)] == [3, 3]
    streams = [by_samples(one, 4, micro_batch_size=2) for one in (iter(range(2)), range(2))]
    assert all(isinstance(one, str) for one in together(streams, 9))


@pytest.mark.parametrize("micro_batch_size", [2, None])
def test_ranks_that_share_a_stream_get_the_samples_of_one_process(
    micro_batch_size: int | None, together: Together
) -> None:
    def data() -> StreamData:
        return by_samples(Counting(11), 6, micro_batch_size=micro_batch_size, shared=True)

    ranks = together([data(), data()], 5)
    for batch, *of_ranks in zip(taken(data(), 5), *ranks, strict=True):
        assert [one.index for rank in of_ranks for one in rank.microbatches] == list(
            range(of_ranks[0].num_microbatches)
        )
        assert list(chain(*samples(of_ranks))) == samples([batch])[0]
        assert {(rank.num_samples, rank.ends_epoch) for rank in of_ranks} == {(batch.num_samples, batch.ends_epoch)}
        if micro_batch_size is None:
            assert all(len(rank.microbatches) == 1 for rank in of_ranks)


def test_ranks_that_share_a_stream_may_leave_out_samples_in_collate(together: Together) -> None:
    def without_first(samples: list[int]) -> torch.Tensor:
        return torch.tensor([one for one in samples if one])

    def data() -> StreamData:
        return StreamData(range(4), global_batch_size=4, micro_batch_size=2, collate=without_first, shared=True)

    for rank, (batch,) in enumerate(together([data(), data()], 1)):
        assert (batch.num_samples, batch.microbatches[0].num_samples) == (4, 1 + rank)


@pytest.mark.parametrize("kind", ["shared", "updates"])
def test_shared_streams_that_differ_are_refused_on_all_ranks(kind: str, together: Together) -> None:
    def data(length: int) -> StreamData:
        if kind == "updates":
            return UpdateData([[1]] * length, samples_in=len)
        return by_samples([1] * length, 2, micro_batch_size=1, shared=True)

    assert all(isinstance(one, str) for one in together([data(4), data(6)], 9))


def test_ranks_that_read_the_same_items_from_streams_of_their_own_say_so_once(together: Together) -> None:
    for rank in together([stream(0, 8), stream(0, 8)], 6):
        assert sum(len(batch.faults) for batch in rank) == 1
    assert not any(batch.faults for rank in together([stream(0, 8), stream(1000, 8)], 6) for batch in rank)
