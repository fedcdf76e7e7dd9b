import pytest
from torch.utils.data import DataLoader, Dataset, RandomSampler

from evenstep.data.iterable import Stateful, stream_epoch_setters
from evenstep.errors import ArgumentError


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
