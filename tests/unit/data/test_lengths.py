import numpy as np
import pytest
import torch

from evenstep.data.lengths import fitting, measure
from evenstep.errors import ArgumentError, DataError


@pytest.mark.parametrize("lengths", [[3, 0, 2], np.array([3, 0, 2]), torch.tensor([3, 0, 2]), [3, 0, 2].__getitem__])
def test_lengths_are_taken_from_a_list_an_array_a_tensor_or_a_function(lengths: object) -> None:
    measured = measure(lengths, 3)
    assert measured.tolist() == [3, 0, 2]
    assert measured.dtype == np.int64


def test_too_few_lengths_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"one number for each of the 3 samples, but has shape \[2\]"):
        measure([1, 2], 3)


@pytest.mark.parametrize("lengths", [[1.5, 2.0], ["a", "b"], [None, 1], [True, False]])
def test_lengths_that_are_not_whole_numbers_are_refused(lengths: object) -> None:
    with pytest.raises(ArgumentError, match="`lengths` must be whole numbers"):
        measure(lengths, 2)


def test_ragged_lengths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no plain list of numbers"):
        measure([[1], [2, 3]], 2)


def test_a_negative_length_names_its_sample() -> None:
    with pytest.raises(ArgumentError, match="sample 1 has -4"):
        measure([1, -4], 2)


def test_a_failing_length_function_names_its_sample() -> None:
    def length(index: int) -> int:
        return [5, 6][index]

    with pytest.raises(DataError, match="measuring sample 2 with `lengths` raised IndexError"):
        measure(length, 4)


def test_an_oversized_sample_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        fitting(np.array([3, 11, 2, 40]), max_tokens=10, oversized="error")
    message = str(caught.value)
    assert "sample 1 has 11 tokens, more than the 10 of a batch" in message
    assert "2 of 4 samples are too long; the longest has 40" in message
    assert 'oversized="skip"' in message


def test_oversized_samples_can_be_left_out() -> None:
    fits = fitting(np.array([3, 11, 2, 10]), max_tokens=10, oversized="skip")
    assert fits.tolist() == [True, False, True, True]


def test_leaving_out_every_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="all 2 samples are longer than the 1 tokens"):
        fitting(np.array([3, 4]), max_tokens=1, oversized="skip")
