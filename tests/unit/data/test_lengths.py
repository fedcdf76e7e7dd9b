from typing import Any

import numpy as np
import pytest
import torch

from evenstep.data.batching import fitting, measure
from evenstep.errors import ArgumentError, DataError
from refused import refused


@pytest.mark.parametrize("lengths", [[3, 0, 2], np.array([3, 0, 2]), torch.tensor([3, 0, 2]), [3, 0, 2].__getitem__])
def test_lengths_are_taken_from_a_list_an_array_a_tensor_or_a_function(lengths: object) -> None:
    measured = measure(lengths, 3)
    assert measured.tolist() == [3, 0, 2]
    assert measured.dtype == np.int64


def test_oversized_samples_can_be_left_out() -> None:
    fits = fitting(np.array([3, 11, 2, 10]), max_tokens=10, oversized="skip")
    assert fits.tolist() == [True, False, True, True]


def test_leaving_out_every_sample_is_an_error() -> None:
    with pytest.raises(DataError):
        fitting(np.array([3, 4]), max_tokens=1, oversized="skip")


@pytest.mark.parametrize("lengths", [[1], [1.5, 2.0], ["a", "b"], [None, 1], [True, False], [1, -1]])
def test_lengths_that_are_not_whole_numbers_for_each_sample_are_refused(lengths: Any) -> None:
    with refused(ArgumentError, "lengths"):
        measure(lengths, 2)
