from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from evenstep.data.dataset import (
    count_samples,
    draws_nothing,
    epoch_setters,
    fetches_many,
    fingerprint_of,
    rows_of,
)
from evenstep.errors import ArgumentError, DataError
from refused import refused


class Squares(Dataset[int]):
    fingerprint = "squares-1"

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Many(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * index for index in indices]


def test_the_epoch_reaches_datasets_inside_subsets_and_concatenations() -> None:
    first, second = Squares(), Squares()
    for set_epoch in epoch_setters(ConcatDataset([Subset(Subset(first, [0, 1]), [1]), second, [1, 2]])):
        set_epoch(4)
    assert (first.epoch, second.epoch) == (4, 4)


def test_a_subset_fetches_many_only_if_its_dataset_does() -> None:
    assert fetches_many(Many())
    assert fetches_many(Subset(Many(), [1]))
    assert not fetches_many(Subset(Squares(), [1]))
    assert not fetches_many([1, 2])


def test_rows_are_what_the_default_collate_function_makes() -> None:
    whole = TensorDataset(torch.randn(9, 2, 3), torch.arange(9), torch.arange(9) > 4)
    for dataset in (whole, Subset(whole, [8, 1, 5, 5, 2]), Subset(Subset(whole, [7, 8, 1, 3, 4]), [4, 0, 2, 1, 3])):
        rows = rows_of(dataset)
        assert rows is not None
        expected = default_collate([dataset[index] for index in [3, 0, 2]])
        actual = rows([3, 0, 2])
        assert type(actual) is type(expected)
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_a_dataset_with_its_own_item_access_is_not_read_by_rows() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return (torch.rand(()),)

    dataset = Noisy(torch.zeros(3))
    assert rows_of(dataset) is None
    assert not draws_nothing(dataset)


def test_a_subset_with_other_samples_has_another_fingerprint() -> None:
    one, same, other = (Subset(Squares(), chosen) for chosen in ([1, 2], [1, 2], [2, 1]))
    assert fingerprint_of(one) == fingerprint_of(same) != fingerprint_of(other)


def test_a_fingerprint_that_json_does_not_know_is_refused() -> None:
    class Odd(Squares):
        fingerprint = b"bytes"

    with refused(DataError, "fingerprint"):
        fingerprint_of(Odd())


@pytest.mark.parametrize("dataset", ["train.csv", {"train": [1]}, iter([1]), [], DataLoader([1])])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with refused(ArgumentError, "dataset"):
        count_samples(dataset)
