"""Samples that are drawn by weights."""

from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from evenstep.data import Data, MapData, Position, ReadOptions, data_of


class Noisy(Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


def drawn(data: Data, count: int, **read: Any) -> list[list[int]]:
    batches = islice(data.batches(ReadOptions(seed=1, **read)), count)
    return [[sample for one in batch.microbatches for sample in one.samples] for batch in batches]


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    data = MapData(range(5), global_batch_size=5, sampling=[1.0, 0.0, 2.0, 5.0, 0.0])
    counts = Counter(chain(*drawn(data, 2000)))
    assert set(counts) == {0, 2, 3}
    assert counts[0] / 10_000 == pytest.approx(1 / 8, abs=0.01)
    assert counts[3] / 10_000 == pytest.approx(5 / 8, abs=0.01)


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_resume_anywhere_and_are_divided_among_ranks(replacement: bool) -> None:
    weights = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0] * 5, 12, replacement=replacement)
    data = MapData(range(20), global_batch_size=4, sampling=weights)
    whole = drawn(data, 9)
    assert drawn(data, 5, start=Position(epoch=1, batch=1)) == whole[4:]
    ranks = [drawn(data, 9, rank=rank, ranks=2) for rank in range(2)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == whole
    assert whole[:3] != whole[3:6]
    if not replacement:
        assert len(set(chain(*whole[:3]))) == 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_is_drawn_twice_has_other_random_numbers(num_workers: int) -> None:
    data = MapData(Noisy(), global_batch_size=3, sampling=[0, 1, 0], collate=list, num_workers=num_workers)
    (microbatch,) = next(data.batches(ReadOptions(seed=1))).microbatches
    data.close()
    assert [index for index, _ in microbatch.data] == [1, 1, 1]
    assert len({noise for _, noise in microbatch.data}) == 3


@pytest.mark.parametrize(
    "sampler", [WeightedRandomSampler([0.0, 1.0, 1.0], 8), RandomSampler(range(3), replacement=True, num_samples=8)]
)
def test_a_loader_that_draws_is_taken_over(sampler: Any) -> None:
    data = data_of(DataLoader([0.0, 1.0, 2.0], batch_size=4, sampler=sampler, drop_last=True), "data")
    assert data.num_batches(0, seed=1) == 2
    found = set(chain(*drawn(data, 10)))
    assert found == ({1, 2} if isinstance(sampler, WeightedRandomSampler) else {0, 1, 2})


def test_a_dataset_that_shrinks_names_its_length() -> None:
    dataset = [1, 2, 3, 4]
    data = MapData(dataset, global_batch_size=4)
    dataset.pop()
    with pytest.raises(Exception, match="has 3 samples now"):
        next(data.batches(ReadOptions(seed=1)))
