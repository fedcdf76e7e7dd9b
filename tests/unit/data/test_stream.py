import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from evenstep.data.stream import Stateful, samples_in, stream_epoch_setters
from evenstep.errors import ArgumentError, DataError


class Told(Dataset[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ToldSampler(RandomSampler):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Opaque:
    pass


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(8, 3), 8),
        (np.zeros((8, 3)), 8),
        (torch.tensor(5.0), 1),
        ((torch.zeros(8, 3), torch.zeros(8)), 8),
        ([np.zeros(8), np.zeros(8)], 8),
        ({"inputs": torch.zeros(8, 3), "mask": torch.zeros(8, 1)}, 8),
        ({"text": ["a", "b"]}, 2),
        (({"inputs": torch.zeros(8, 3)}, torch.zeros(8)), 8),
        (((torch.zeros(3, 5, 5), torch.zeros(3, 9, 4)), ({"boxes": 1}, {"boxes": 2})), 2),
        (["a", "b", "c"], 3),
        ([], 0),
        ({}, 0),
    ],
)
def test_samples_are_counted_by_the_first_dimension_of_the_first_part(batch: object, expected: int) -> None:
    assert samples_in(batch) == expected


def test_a_batch_that_does_not_tell_asks_for_a_function() -> None:
    with pytest.raises(DataError):
        samples_in(Opaque())


def test_an_epoch_reaches_the_dataset_and_the_sampler_inside_a_data_loader() -> None:
    dataset = Told()
    sampler = ToldSampler(dataset)
    for set_epoch in stream_epoch_setters(DataLoader(dataset, batch_size=2, sampler=sampler)):
        set_epoch(3)
    assert (dataset.epoch, sampler.epoch) == (3, 3)


def test_persistent_workers_that_never_hear_of_an_epoch_are_refused() -> None:
    loader = DataLoader(Told(), num_workers=1, persistent_workers=True)
    with pytest.raises(ArgumentError):
        stream_epoch_setters(loader)


def test_a_data_loader_is_no_stateful_stream() -> None:
    assert not isinstance(DataLoader(Told()), Stateful)
