"""scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels, about a fifth of them kept for testing.

An image is a test image by a hash of its number, so the split is the same everywhere and for ever. The images come
with scikit-learn; nothing is fetched.
"""

from typing import Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from evenstep.errors import ArgumentError, MissingExtraError

Split = Literal["train", "test"]

TEST_ONE_IN = 5
BRIGHTEST = 16.0
SIDE = 8


def split_of(index: int) -> Split:
    """The split of image `index`: test for one in 5, by crc32 of its decimal digits."""
    return "test" if crc32(str(index).encode()) % TEST_ONE_IN == 0 else "train"


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images `[1, 8, 8]` from 0 (paper) to 1 (ink), and the digit that each shows.

    Args:
        images: `[image, 1, 8, 8]`.
        shown: `[image]`, from 0 to 9.
        max_shift: every time it is read, an image is moved by up to so many pixels in both directions, at random.
    """

    def __init__(self, images: Tensor, shown: Tensor, *, max_shift: int = 0) -> None:
        if not 0 <= max_shift < SIDE:
            raise ArgumentError(f"`max_shift` must be between 0 and {SIDE - 1} pixels, but is {max_shift}.")
        self.padded = F.pad(images, (max_shift, max_shift, max_shift, max_shift))
        self.shown = shown
        self.max_shift = max_shift
        self.fingerprint = f"{crc32(self.padded.numpy().tobytes()):08x}"

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(2 * self.max_shift + 1, (2,)).tolist() if self.max_shift else (0, 0)
        return self.padded[index, :, down : down + SIDE, right : right + SIDE], self.shown[index]


def digits(split: Split, *, max_shift: int = 0) -> Digits:
    """One split of scikit-learn's digits.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    if split not in ("train", "test"):
        raise ArgumentError(f'`split` must be "train" or "test", but is {split!r}.')
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo") from error
    pixels, shown = load_digits(return_X_y=True)
    chosen = [index for index in range(len(shown)) if split_of(index) == split]
    images = torch.tensor(pixels[chosen] / BRIGHTEST, dtype=torch.float32).view(-1, 1, SIDE, SIDE)
    return Digits(images, torch.tensor(shown[chosen], dtype=torch.int64), max_shift=max_shift)
