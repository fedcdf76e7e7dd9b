import random
import time
import tracemalloc
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from evenstep.data import GlobalBatch, MapData, Position, Reading, ReadOptions
from evenstep.errors import DataError


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Each sample is its number and what the three generators draw for it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.randn()), random.random()


class NoisyMany(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


class Remembering(Dataset[tuple[int, int]]):
    """Each sample is its number and the epoch that the dataset was last told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.told[-1]

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 17:
            raise ValueError("bad pixel")
        return index


def samples(batch: GlobalBatch) -> list[list[int]]:
    """The samples of a batch of a dataset of numbers, collated by `list`."""
    return [list(microbatch.data) for microbatch in batch.microbatches]


@given(
    num_samples=st.integers(1, 30),
    global_batch_size=st.integers(1, 12),
    micro_batch_size=st.integers(1, 12),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_ranks_together_see_what_one_rank_sees(
    num_samples: int, global_batch_size: int, micro_batch_size: int, ranks: int, seed: int
) -> None:
    data = MapData(
        range(num_samples),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        collate=list,
        num_epochs=2,
    )
    alone = [batch.microbatches for batch in data.batches(ReadOptions(seed=seed))]
    of_ranks = [list(data.batches(ReadOptions(seed=seed, rank=rank, ranks=ranks))) for rank in range(ranks)]
    together = [sum((batch.microbatches for batch in same), ()) for same in zip(*of_ranks, strict=True)]
    assert together == alone


@given(
    num_samples=st.integers(1, 30),
    global_batch_size=st.integers(1, 12),
    micro_batch_size=st.none() | st.integers(1, 12),
    shuffle=st.booleans(),
)
def test_every_cut_sees_every_sample_of_an_epoch_once_and_the_same_ones_per_update(
    num_samples: int, global_batch_size: int, micro_batch_size: int | None, shuffle: bool
) -> None:
    assume(not micro_batch_size or micro_batch_size <= global_batch_size)

    def updates(micro: int | None) -> list[list[int]]:
        data = MapData(
            range(num_samples),
            global_batch_size=global_batch_size,
            micro_batch_size=micro,
            shuffle=shuffle,
            collate=list,
            num_epochs=1,
        )
        return [list(chain(*samples(batch))) for batch in data.batches(ReadOptions(seed=3))]

    assert updates(micro_batch_size) == updates(None)
    assert sorted(chain(*updates(None))) == list(range(num_samples))


@given(
    num_samples=st.integers(1, 20),
    global_batch_size=st.integers(1, 8),
    curriculum_epochs=st.integers(0, 2),
    skip=st.integers(0, 30),
)
def test_a_resume_at_every_position_gives_the_rest_of_the_sequence(
    num_samples: int, global_batch_size: int, curriculum_epochs: int, skip: int
) -> None:
    def data() -> MapData:
        return MapData(
            range(num_samples),
            global_batch_size=global_batch_size,
            curriculum_epochs=curriculum_epochs,
            collate=list,
        )

    uninterrupted = list(islice(data().batches(ReadOptions(seed=5)), skip + 12))
    start = uninterrupted[skip - 1].following if skip else Position()
    assert list(islice(data().batches(ReadOptions(start=start, seed=5)), 12)) == uninterrupted[skip:]


def test_nothing_is_given_after_the_last_epoch() -> None:
    data = MapData(range(10), global_batch_size=4, num_epochs=2)
    assert list(data.batches(ReadOptions(start=Position(epoch=2), seed=1))) == []
    assert len(list(data.batches(ReadOptions(start=Position(epoch=1), seed=1)))) == 3


def test_a_global_batch_by_count_is_cut_into_micro_batches_by_tokens() -> None:
    data = MapData(
        range(6),
        global_batch_size=6,
        micro_batch_tokens=6,
        lengths=[1, 6, 2, 3, 2, 1],
        shuffle=False,
        collate=list,
    )
    assert samples(next(data.batches(ReadOptions(seed=1)))) == [[0, 5, 2], [4, 3], [1]]


def test_augmentation_does_not_depend_on_the_cut_or_the_ranks() -> None:
    def values(rank: int, ranks: int, micro_batch_size: int | None) -> list[tuple[float, ...]]:
        data = MapData(Noisy(12), global_batch_size=6, micro_batch_size=micro_batch_size, collate=list, num_epochs=2)
        return [
            sample
            for batch in data.batches(ReadOptions(seed=1, rank=rank, ranks=ranks))
            for microbatch in batch.microbatches
            for sample in microbatch.data
        ]

    expected = values(0, 1, None)
    assert values(0, 1, 1) == values(0, 1, 4) == expected
    assert sorted(values(0, 2, 2) + values(1, 2, 2)) == sorted(expected)
    assert len({sample[1:] for sample in expected}) == 24


def test_augmentation_differs_between_epochs_and_seeds() -> None:
    data = MapData(Noisy(4), global_batch_size=4, shuffle=False, collate=list)

    def values(epoch: int, seed: int) -> object:
        return next(data.batches(ReadOptions(start=Position(epoch=epoch), seed=seed))).microbatches[0].data

    assert values(0, 1) != values(1, 1)
    assert values(0, 1) != values(0, 2)
    assert values(1, 1) == values(1, 1)


def test_a_dataset_that_fetches_many_is_seeded_for_each_micro_batch() -> None:
    def values(start: Position) -> list[object]:
        data = MapData(NoisyMany(8), global_batch_size=4, micro_batch_size=2, collate=list)
        return [microbatch.data for microbatch in next(data.batches(ReadOptions(start=start, seed=1))).microbatches]

    assert values(Position(batch=1)) == values(Position(batch=1))
    first, second = values(Position())
    assert first[0][1:] != second[0][1:]


def test_a_random_collate_function_is_seeded_even_over_a_plain_list() -> None:
    def noise(batch: list[int]) -> float:
        return random.random()

    def values() -> list[object]:
        data = MapData(range(8), global_batch_size=2, collate=noise)
        return [batch.microbatches[0].data for batch in islice(data.batches(ReadOptions(seed=1)), 4)]

    assert values() == values()
    assert len(set(values())) == 4


@pytest.mark.parametrize("dataset", [Noisy(6), NoisyMany(6)])
def test_the_users_generators_are_left_as_they_were(dataset: Noisy) -> None:
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    for _ in islice(MapData(dataset, global_batch_size=3).batches(ReadOptions(seed=1)), 5):
        pass
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    assert random.getstate() == states[2]


def test_without_seeding_the_generators_are_the_users() -> None:
    torch.manual_seed(3)
    expected = float(torch.rand(()))
    torch.manual_seed(3)
    data = MapData(Noisy(6), global_batch_size=1, collate=list, reading=Reading(seed_samples=False))
    assert next(data.batches(ReadOptions(seed=1))).microbatches[0].data[0][1] == expected


def test_the_dataset_is_told_of_each_epoch_once_and_of_the_one_it_resumes_in() -> None:
    dataset = Remembering()
    data = MapData(dataset, global_batch_size=2, collate=list)
    batches = list(islice(data.batches(ReadOptions(start=Position(epoch=3, batch=1), seed=1)), 7))
    assert dataset.told == [3, 4, 5]
    for batch in batches:
        assert all(epoch == batch.position.epoch for _, epoch in batch.microbatches[0].data)


def test_parts_of_one_dataset_that_are_read_by_turns_are_each_in_their_own_epoch() -> None:
    dataset = Remembering()
    trained, evaluated = (MapData(Subset(dataset, part), global_batch_size=2) for part in ([0, 1, 2, 3], [4]))
    batches = trained.batches(ReadOptions(start=Position(epoch=3), seed=1))
    epochs: list[list[int]] = []
    for _ in range(3):
        epochs.append(next(batches).microbatches[0].data[1].tolist())
        epochs.append(next(evaluated.batches(ReadOptions(seed=1))).microbatches[0].data[1].tolist())
    assert epochs == [[3, 3], [0], [3, 3], [0], [4, 4], [0]]


def test_reading_can_go_on_after_a_failure() -> None:
    data = MapData(Failing(), global_batch_size=4, shuffle=False, collate=list)
    with pytest.raises(DataError):
        next(data.batches(ReadOptions(start=Position(batch=4), seed=1)))
    assert samples(next(data.batches(ReadOptions(start=Position(epoch=1), seed=1)))) == [[0, 1, 2, 3]]


def test_the_fingerprint_changes_with_all_that_changes_the_samples_of_an_update() -> None:
    lengths = [1, 2, 3, 4]
    base = {"global_batch_tokens": 8, "lengths": lengths}
    variants = [
        MapData(range(4), **base),
        MapData(range(3), **(base | {"lengths": lengths[:3]})),
        MapData(range(4), **(base | {"lengths": [1, 2, 4, 3]})),
        MapData(range(4), **(base | {"global_batch_tokens": 9})),
        MapData(range(4), **base, micro_batch_tokens=3, oversized="skip"),
        MapData(range(4), **base, batch_size_multiple=2),
        MapData(range(4), **base, length_window=2),
        MapData(range(4), **base, shuffle=False),
        MapData(range(4), **base, curriculum_epochs=1),
        MapData(Subset(range(4), [0, 1, 2, 3]), **base),
        MapData(range(4), global_batch_size=2),
    ]
    fingerprints = [repr(variant.fingerprint()) for variant in variants]
    assert len(set(fingerprints)) == len(fingerprints)


def test_the_fingerprint_does_not_depend_on_how_a_global_batch_is_cut() -> None:
    base = {"global_batch_tokens": 8, "lengths": [1, 2, 3, 4]}
    cuts = [{}, {"micro_batch_tokens": 4}, {"micro_batch_size": 1}]
    prints = [MapData(range(4), **base, **cut).fingerprint() for cut in cuts]
    assert len({repr(one.pop("cut")) for one in prints}) == 3
    assert prints[0] == prints[1] == prints[2]


@pytest.mark.parametrize("num_samples", [10**6, 10**9, 10**12])
def test_a_start_takes_neither_time_nor_memory_that_grow_with_the_dataset(num_samples: int) -> None:
    def start() -> set[int]:
        data = MapData(range(num_samples), global_batch_size=32)
        assert [data.num_batches(epoch, seed=1) for epoch in range(50)] == [num_samples // 32] * 50
        batches = data.batches(ReadOptions(start=Position(epoch=7, batch=num_samples // 64), seed=1))
        return {sample for batch in islice(batches, 3) for sample in batch.microbatches[0].samples}

    assert len(start()) == 96
    tracemalloc.start()
    try:
        start()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1e6  # bytes
    times: list[float] = []
    for _ in range(5):
        began = time.process_time()
        start()
        times.append(time.process_time() - began)
    assert min(times) < 0.05


def test_a_fingerprint_asks_the_dataset_once() -> None:
    class Asked(list[int]):
        count = 0

        def fingerprint(self) -> str:
            self.count += 1
            return "numbers"

    dataset = Asked([1, 2, 3])
    data = MapData(dataset, global_batch_size=2)
    assert data.fingerprint() == data.fingerprint()
    assert dataset.count == 1
