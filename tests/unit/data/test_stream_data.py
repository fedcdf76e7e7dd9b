from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from evenstep.data import GlobalBatch, MapData, Position, ReadOptions, StreamData
from evenstep.data.iterable import stream_epoch_setters
from evenstep.errors import ArgumentError, DataError
from refused import refused


class Counting:
    """A stream with a state: `length` numbers an epoch, which differ from epoch to epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.next = 0
        self.given: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            number = 100 * self.epoch + self.next
            self.next += 1
            self.given.append(number)
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]


class Shared(Counting):
    """One that hands out its live state, to be changed as it goes on."""

    def __init__(self, length: int) -> None:
        self.state = {"next": 0}
        super().__init__(length)

    @property
    def next(self) -> int:
        return self.state["next"]

    @next.setter
    def next(self, value: int) -> None:
        self.state["next"] = value

    def state_dict(self) -> dict[str, int]:
        return self.state


class Breaking:
    """Gives `good` numbers an epoch, then fails."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __iter__(self) -> Iterator[int]:
        yield from range(self.good)
        raise OSError("connection lost")


def numbers(batch: GlobalBatch) -> list[list[int]]:
    return [list(microbatch.data) for microbatch in batch.microbatches]


class Remembering(Dataset[int]):
    """Six samples, each of which is the epoch that was last told."""

    epoch = -1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def by_samples(stream: object, global_batch_size: int, **options: object) -> StreamData:
    return StreamData(stream, global_batch_size=global_batch_size, collate=list, **options)


def test_a_global_batch_is_cut_into_micro_batches() -> None:
    batch = next(by_samples(range(10), 10, micro_batch_size=4).batches(ReadOptions(seed=1)))
    assert numbers(batch) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [microbatch.index for microbatch in batch.microbatches] == [0, 1, 2]
    assert [microbatch.num_samples for microbatch in batch.microbatches] == [4, 4, 2]
    assert batch.num_microbatches == 3


def test_ready_made_batches_are_grouped_and_the_last_group_may_be_short() -> None:
    ready = [torch.full((size,), float(size)) for size in (3, 5, 2, 4, 1)]
    data = StreamData(ready, batched=True, num_microbatches=2)
    batches = list(islice(data.batches(ReadOptions(seed=1)), 4))
    assert [batch.num_samples for batch in batches] == [8, 6, 1, 8]
    assert [batch.num_microbatches for batch in batches] == [2, 2, 1, 2]
    assert [batch.ends_epoch for batch in batches] == [False, False, True, False]
    assert batches[1].microbatches[1].data is ready[3]


def test_an_iterator_that_begins_anew_gives_epoch_after_epoch() -> None:
    class Rewinding:
        def __iter__(self) -> "Rewinding":
            self.left = 3
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    batches = list(islice(by_samples(Rewinding(), 2).batches(ReadOptions(seed=1)), 5))
    assert [numbers(batch) for batch in batches] == [[[2, 1]], [[0]], [[2, 1]], [[0]], [[2, 1]]]


@pytest.mark.parametrize("stream", [[], iter(())])
def test_a_stream_that_gives_nothing_is_an_error(stream: object) -> None:
    with pytest.raises(DataError):
        next(by_samples(stream, 2).batches(ReadOptions(seed=1)))


@given(
    length=st.integers(1, 12),
    global_batch_size=st.integers(1, 5),
    micro_batch_size=st.none() | st.integers(1, 3),
    skip=st.integers(1, 20),
    stream_type=st.sampled_from([Counting, Shared]),
)
def test_a_stream_with_state_resumes_at_every_position_without_replay(
    length: int, global_batch_size: int, micro_batch_size: int | None, skip: int, stream_type: type[Counting]
) -> None:
    assume(not micro_batch_size or micro_batch_size <= global_batch_size)

    def data(stream: Counting) -> StreamData:
        return by_samples(stream, global_batch_size, micro_batch_size=micro_batch_size)

    uninterrupted = list(islice(data(stream_type(length)).batches(ReadOptions(seed=1)), skip + 6))
    first = data(stream_type(length))
    first_batches = first.batches(ReadOptions(seed=1))
    last = list(islice(first_batches, skip))[-1]
    state = deepcopy(first.state_dict())

    stream = stream_type(length)
    second = data(stream)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert list(islice(second.batches(ReadOptions(start=last.following, seed=1)), 6)) == uninterrupted[skip:]
    num_needed = sum(batch.num_samples for batch in uninterrupted[skip:])
    # One more is looked ahead at, and one may be needed to learn that the state is that of a new epoch.
    assert len(stream.given) <= num_needed + 2


def test_the_state_is_that_of_the_batch_handed_out_and_not_of_what_was_read_ahead() -> None:
    stream = Counting(10)
    data = by_samples(stream, 3)
    batches = data.batches(ReadOptions(seed=1))
    assert data.state_dict() == {}
    next(batches)
    assert stream.next == 4
    assert data.state_dict()["stream"] == {"next": 3}


def test_a_state_of_another_position_is_refused() -> None:
    first = by_samples(Counting(10), 2)
    list(islice(first.batches(ReadOptions(seed=1)), 2))
    second = by_samples(Counting(10), 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError):
        second.batches(ReadOptions(start=Position(batch=1), seed=1))


def test_a_state_after_which_a_shorter_stream_has_nothing_is_refused() -> None:
    first = by_samples(Counting(10), 2)
    list(islice(first.batches(ReadOptions(seed=1)), 2))
    second = by_samples(Counting(4), 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError):
        second.batches(ReadOptions(start=Position(batch=2), seed=1))


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(DataError):
        by_samples(Counting(4), 2).load_state_dict({"step": 3})


def test_a_stream_without_state_begins_its_epoch_again_and_says_so_once() -> None:
    data = by_samples(range(5), 2)
    assert (data.state.positions, data.state.scope, data.state_dict()) == ("epochs", "run", {})
    first, second, third = islice(data.batches(ReadOptions(start=Position(epoch=1, batch=3), seed=1)), 3)
    assert [numbers(batch) for batch in (first, second, third)] == [[[0, 1]], [[2, 3]], [[4]]]
    assert (first.position, third.following) == (Position(epoch=1, batch=3), Position(epoch=2))
    assert "StatefulDataLoader" in first.faults[0].message
    assert not second.faults


def test_a_stream_with_state_cannot_start_where_it_has_none() -> None:
    with pytest.raises(DataError):
        by_samples(Counting(10), 2).batches(ReadOptions(start=Position(epoch=1, batch=3), seed=1))


class Stale(Counting):
    """Its state is that of the item given last, also right after another one was loaded."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.told = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.told = {"next": self.next}
            yield number

    def state_dict(self) -> dict[str, int]:
        return self.told


@pytest.mark.parametrize("resumed_at", [0, 1, 2, 3, 4])
def test_a_state_that_is_stale_until_an_item_is_given_loses_nothing(resumed_at: int) -> None:
    whole = list(islice(by_samples(Stale(6), 2).batches(ReadOptions(seed=1)), 8))
    first = by_samples(Stale(6), 2)
    position = ([Position(), *(one.following for one in islice(first.batches(ReadOptions(seed=1)), resumed_at))])[-1]
    second = by_samples(Stale(6), 2)
    second.load_state_dict(first.state_dict(position))
    second.batches(ReadOptions(start=position, seed=1))  # such as to try a batch out
    assert second.state_dict(position) == first.state_dict(position)
    assert list(islice(second.batches(ReadOptions(start=position, seed=1)), 8 - resumed_at)) == whole[resumed_at:]


def test_a_stream_goes_on_where_it_was_left_in_the_same_process() -> None:
    data = by_samples((number for number in range(7)), 2)
    first = next(data.batches(ReadOptions(seed=1)))
    rest = list(data.batches(ReadOptions(start=first.following, seed=1)))
    assert [numbers(batch) for batch in rest] == [[[2, 3]], [[4, 5]], [[6]]]


def test_ranks_take_their_share_of_the_micro_batches_each_from_its_own_stream() -> None:
    of_ranks = [
        next(by_samples(range(20), 10, micro_batch_size=4).batches(ReadOptions(seed=1, rank=rank, ranks=2)))
        for rank in range(2)
    ]
    assert [numbers(batch) for batch in of_ranks] == [[[0, 1, 2, 3]], [[0, 1, 2, 3], [4, 5]]]
    assert [[microbatch.index for microbatch in batch.microbatches] for batch in of_ranks] == [[0], [1, 2]]
    assert [batch.num_microbatches for batch in of_ranks] == [3, 3]


def test_a_rank_that_would_get_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError):
        StreamData([1], batched=True, num_microbatches=2).batches(ReadOptions(seed=1, rank=0, ranks=3))
    with pytest.raises(ArgumentError):
        StreamData([1], global_batch_size=2).batches(ReadOptions(seed=1, rank=0, ranks=3))


def test_the_fingerprint_holds_the_sizes_and_the_streams_own() -> None:
    class Named(list[int]):
        fingerprint = "numbers-1"

    assert by_samples(Named([1]), 4, micro_batch_size=2).fingerprint() == {
        "kind": "stream",
        "global_batch_size": 4,
        "batched": False,
        "num_microbatches": 1,
        "stream": "numbers-1",
        "cut": {"micro_batch_size": 2},
    }


def test_the_state_before_the_last_global_batch_is_kept_for_a_run_that_fails_in_it() -> None:
    data = by_samples(Counting(10), 2)
    batches = list(islice(data.batches(ReadOptions(seed=1)), 3))
    assert data.state_dict(batches[2].position)["stream"] == {"next": 4}
    assert data.state_dict(batches[2].following)["stream"] == {"next": 6}
    with pytest.raises(DataError):
        data.state_dict(batches[1].position)


def test_what_could_not_be_counted_is_given_again_to_whoever_begins_there_again() -> None:
    faults = ["no weight"]

    def samples_in(number: int) -> int:
        if number == 2 and faults:
            raise DataError(faults.pop())
        return 1

    data = StreamData(Counting(5), batched=True, samples_in=samples_in)
    batches = data.batches(ReadOptions(seed=1))
    assert [batch.microbatches[0].data for batch in islice(batches, 2)] == [0, 1]
    with pytest.raises(DataError):
        next(batches)
    again = data.batches(ReadOptions(start=Position(batch=2), seed=1))
    assert next(again).microbatches[0].data == 2


def test_a_stream_that_iterating_goes_on_with_is_read_from_its_beginning_where_a_run_goes_back_there() -> None:
    class GoesOn:
        at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 6:
                self.at += 1
                yield self.at
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.at = state["at"]

    data = StreamData(GoesOn(), global_batch_size=2)
    for read in (1, 2):
        batches = [next(data.batches(ReadOptions(seed=0))).microbatches[0].data.tolist() for _ in range(read)]
        assert batches[0] == [1, 2]
        data.load_state_dict({})


def test_a_stream_stays_in_its_epoch_though_a_part_of_its_dataset_is_evaluated_meanwhile() -> None:
    dataset = Remembering()
    trained = StreamData(DataLoader(dataset, batch_size=2), batched=True, samples_in=len)
    evaluated = MapData(Subset(dataset, [0, 1]), global_batch_size=2)
    batches = trained.batches(ReadOptions(start=Position(epoch=3), seed=1))
    seen: list[list[int]] = []
    for _ in range(4):
        seen.append(next(batches).microbatches[0].data.tolist())
        assert next(evaluated.batches(ReadOptions(seed=1))).microbatches[0].data.tolist() == [0, 0]
    assert seen == [[3, 3], [3, 3], [3, 3], [4, 4]]


@pytest.mark.parametrize("stream", ["train.csv", {"train": [1]}, 3, lambda: iter([1])])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with refused(ArgumentError, "stream"):
        StreamData(stream, global_batch_size=4)


class ToldSampler(RandomSampler):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_an_epoch_reaches_the_dataset_and_the_sampler_inside_a_data_loader() -> None:
    dataset = Remembering()
    sampler = ToldSampler(dataset)
    for set_epoch in stream_epoch_setters(DataLoader(dataset, batch_size=2, sampler=sampler)):
        set_epoch(3)
    assert (dataset.epoch, sampler.epoch) == (3, 3)


def test_persistent_workers_that_never_hear_of_an_epoch_are_refused() -> None:
    loader = DataLoader(Remembering(), num_workers=1, persistent_workers=True)
    with pytest.raises(ArgumentError):
        stream_epoch_setters(loader)
