"""How many tokens each sample has, and which samples fit a budget.

Lengths are measured once, before training, so that batches can be cut without reading a sample. It does not cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenstep.errors import ArgumentError, DataError, clause

Lengths: TypeAlias = Sequence[int] | NDArray[Any] | Tensor | Callable[[int], int]
Oversized = Literal["error", "skip"]  # what becomes of a sample that is longer than a budget


def measure(lengths: Lengths, num_samples: int) -> NDArray[np.int64]:
    """The lengths of all samples, `[num_samples]` in tokens.

    Args:
        lengths: one number per sample, or a function that gives the one of a sample's number.

    Raises:
        ArgumentError: not one whole number, at least 0, per sample.
        DataError: the function fails.

    >>> measure(lambda index: 2 * index, 3).tolist()
    [0, 2, 4]
    """
    array = _as_array(lengths, num_samples)
    if array.shape != (num_samples,):
        raise ArgumentError(
            f"`lengths` must hold one number for each of the {num_samples} samples, but has shape "
            f"{list(array.shape)}; measure the dataset that is trained on."
        )
    if array.dtype.kind not in "iu":
        raise ArgumentError(
            f"`lengths` must be whole numbers of tokens, but are {array.dtype}; count the tokens of each sample."
        )
    measured = array.astype(np.int64)
    if measured.min() < 0:
        shortest = int(np.argmin(measured))
        raise ArgumentError(
            f"`lengths` must not be negative, but sample {shortest} has {measured[shortest]}; count its tokens."
        )
    return measured


def _as_array(lengths: Lengths, num_samples: int) -> NDArray[Any]:
    if not callable(lengths):
        try:
            return np.asarray(lengths)
        except ValueError as error:
            raise ArgumentError(
                f"`lengths` must hold one whole number for each sample, but is no plain list of numbers "
                f"({clause(str(error))}); "
                "count the tokens of each sample."
            ) from error
    counted: list[int] = []
    for index in range(num_samples):
        try:
            counted.append(lengths(index))
        except Exception as error:
            raise DataError(
                f"measuring sample {index} with `lengths` raised {clause(error)}; "
                "correct the function, or correct or remove that sample."
            ) from error
    return _as_array(counted, num_samples)


def fitting(lengths: NDArray[np.int64], *, max_tokens: int, oversized: Oversized) -> NDArray[np.bool_]:
    """Which samples fit the budget alone.

    Args:
        lengths: `[samples]`, in tokens.
        max_tokens: the budget of a batch.
        oversized: whether a sample that does not fit is an error or is left out.

    Raises:
        DataError: a sample does not fit and `oversized` is "error", or no sample fits.

    >>> fitting(np.array([3, 9, 4]), max_tokens=5, oversized="skip").tolist()
    [True, False, True]
    """
    fits = lengths <= max_tokens
    num_over = int(np.count_nonzero(~fits))
    if num_over and oversized == "error":
        first = int(np.argmin(fits))
        raise DataError(
            f"sample {first} has {int(lengths[first])} tokens, more than the {max_tokens} of a batch"
            f" ({num_over} of {len(lengths)} samples are too long; the longest has {int(lengths.max())}); "
            'raise the token budget, cut the samples, or leave them out with `oversized="skip"`.'
        )
    if num_over == len(lengths):
        raise DataError(
            f"all {len(lengths)} samples are longer than the {max_tokens} tokens of a batch "
            f"(the shortest has {int(lengths.min())}); raise the token budget or cut the samples."
        )
    return fits
