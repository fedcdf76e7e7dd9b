from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from evenstep.data import Data, GlobalBatch, MapData, Mixture, Position, StreamData
from evenstep.data.first_batches import FirstBatches
from evenstep.errors import ArgumentError, DataError

START = Position()


def taken(data: Data, start: Position = START, count: int = 7) -> list[GlobalBatch]:
    return list(islice(data.batches(start, seed=3), count))


def samples(batch: GlobalBatch) -> list[int]:
    return [number for one in batch.microbatches for number in one.samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_epoch_is_the_beginning_of_the_whole_one_in_its_own_order(num_workers: int) -> None:
    whole = MapData(list(range(20)), global_batch_size=4, num_workers=num_workers)
    first = FirstBatches(MapData(list(range(20)), global_batch_size=4, num_workers=num_workers), 2)
    by_position = {one.position: samples(one) for one in taken(whole, count=15)}
    found = taken(first, count=6)
    assert [one.position for one in found] == [
        Position(*place) for place in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    ]
    assert [samples(one) for one in found] == [by_position[one.position] for one in found]
    assert [one.ends_epoch for one in found] == [False, True] * 3
    assert [one.following for one in found[:-1]] == [one.position for one in found[1:]]
    whole.close()
    first.close()


def test_it_starts_at_any_of_its_positions() -> None:
    first = FirstBatches(MapData(list(range(20)), global_batch_size=4), 3)
    everything = taken(first)
    for number, one in enumerate(everything):
        assert [samples(other) for other in taken(first, one.position, 7 - number)] == [
            samples(other) for other in everything[number:]
        ]
    with pytest.raises(DataError, match="batch 3 of epoch 0, of which only the first 3 are taken"):
        taken(first, Position(0, 3))


def test_more_than_there_are_leave_the_data_as_they_are() -> None:
    whole, first = (MapData(list(range(10)), global_batch_size=4, num_epochs=2) for _ in range(2))
    assert [samples(one) for one in taken(FirstBatches(first, 9))] == [samples(one) for one in taken(whole)]
    assert FirstBatches(first, 9).num_batches(0, seed=3) == 3
    assert FirstBatches(first, 2).num_batches(0, seed=3) == 2


def test_a_mixture_ends_its_epochs_early_too() -> None:
    def sets() -> dict[str, Data]:
        return {name: MapData(list(range(12)), global_batch_size=2) for name in ("a", "b")}

    whole = {one.position: samples(one) for one in taken(Mixture(sets()), count=12)}
    found = taken(FirstBatches(Mixture(sets()), 2), count=4)
    assert [one.position for one in found] == [Position(0, 0), Position(0, 1), Position(1, 0), Position(1, 1)]
    assert [samples(one) for one in found] == [whole[one.position] for one in found]


def test_of_a_stream_only_the_first_pass_is_taken() -> None:
    class Numbers(IterableDataset[torch.Tensor]):
        def __iter__(self) -> "map[torch.Tensor]":
            return map(torch.tensor, range(9))

    first = FirstBatches(StreamData(Numbers(), global_batch_size=2), 2)
    assert [one.ends_epoch for one in taken(first)] == [False, True]
    assert not first.resumable


def test_another_number_of_batches_is_another_run() -> None:
    data = MapData([1, 2, 3], global_batch_size=1)
    assert FirstBatches(data, 1).fingerprint() != FirstBatches(data, 2).fingerprint()
    with pytest.raises(ArgumentError, match="`batches` must be a whole number of at least 1"):
        FirstBatches(data, 0)


def test_sizes_that_change_by_updates_are_refused_behind_an_epoch_that_is_cut_short() -> None:
    def sizes(batches: int, unit: Any) -> list[int]:
        data = MapData(range(6), global_batch_size=[(1, 1), (2, 2)], batch_size_unit=unit, shuffle=False)
        return [one.num_samples for one in islice(FirstBatches(data, batches).batches(Position(), seed=1), 6)]

    assert sizes(2, "epochs") == [1, 1, 2, 2, 2, 2]
    assert sizes(4, "updates") == [1, 2, 2, 1, 2, 2]  # whole epochs
    with pytest.raises(DataError, match=r"epoch 2 of `FirstBatches\(…, 2\)` cannot begin"):
        sizes(2, "updates")
