from itertools import islice

import pytest

from evenstep.data import Data, GlobalBatch, MapData, Position, ReadOptions, StreamData

START = Position()


def taken(data: Data, start: Position = START, count: int = 7) -> list[GlobalBatch]:
    return list(islice(data.batches(ReadOptions(start=start, seed=3)), count))


def samples(batch: GlobalBatch) -> list[int]:
    return [number for one in batch.microbatches for number in one.samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_epoch_is_the_beginning_of_the_whole_one_in_its_own_order(num_workers: int) -> None:
    whole = MapData(list(range(20)), global_batch_size=4, num_workers=num_workers)
    first = MapData(list(range(20)), global_batch_size=4, num_workers=num_workers, limit_batches=2)
    by_position = {one.position: samples(one) for one in taken(whole, count=15)}
    found = taken(first, count=6)
    assert [tuple(one.position) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [samples(one) for one in found] == [by_position[one.position] for one in found]
    assert [one.ends_epoch for one in found] == [False, True] * 3
    assert [one.following for one in found[:-1]] == [one.position for one in found[1:]]
    whole.close()
    first.close()


def test_more_than_there_are_leave_the_data_as_they_are() -> None:
    whole, first = (MapData(range(10), global_batch_size=4, num_epochs=2, limit_batches=n) for n in (None, 9))
    assert [samples(one) for one in taken(first)] == [samples(one) for one in taken(whole)]
    assert first.num_batches(0, seed=3) == 3


def test_a_stream_ends_with_the_limit() -> None:
    first = StreamData(iter(range(9)), global_batch_size=2, limit_batches=2)
    assert [one.ends_epoch for one in taken(first)] == [False, True]
    assert first.state.positions == "epochs"


def test_sizes_that_change_by_updates_count_the_batches_that_are_taken() -> None:
    data = MapData(range(6), global_batch_size=[(1, 1), (4, 2)], shuffle=False, limit_batches=2)
    assert [one.num_samples for one in taken(data, count=6)] == [1, 1, 1, 2, 2, 2]
