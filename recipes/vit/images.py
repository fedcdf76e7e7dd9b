"""Handwritten digits as they come with scikit-learn: 1,797 images of 8 × 8 pixels, every fifth of them a test image."""

from typing import Literal, get_args

import torch
from torch.utils.data import TensorDataset

from evenstep.errors import ArgumentError, MissingExtraError

Split = Literal["train", "test"]

MEAN, DEVIATION = 4.884, 6.017  # of all pixels, which are from 0 to 16


def images(split: Split) -> TensorDataset:
    """Standardised images `[1, 8, 8]`, and the digit that each shows.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    if split not in get_args(Split):
        raise ArgumentError(f'`split` must be "train" or "test", but is {split!r}.')
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo") from error
    pixels, shown = load_digits(return_X_y=True)
    chosen = torch.arange(len(shown)) % 5 == 4
    chosen = chosen if split == "test" else ~chosen
    standardised = (torch.tensor(pixels, dtype=torch.float32)[chosen] - MEAN) / DEVIATION
    return TensorDataset(standardised.view(-1, 1, 8, 8), torch.tensor(shown)[chosen])
