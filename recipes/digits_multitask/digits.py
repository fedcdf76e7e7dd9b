"""scikit-learn's handwritten digits, annotated three times: each task has labels for other images.

A third of the training images has a class, another third a parity (which half of them lacks), another a box around the
stroke; which, is told by a hash of the image's number, so it is the same everywhere and for ever. The test images have
all three. The training images are themselves divided into `fit` and `valid`, to choose settings by; those of `valid`
have all labels too. The images come with scikit-learn; nothing is fetched.
"""

from collections.abc import Callable
from typing import Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from evenstep.errors import ArgumentError, MissingExtraError

Split = Literal["train", "test", "fit", "valid"]
Label = Literal["class", "parity", "box"]

TEST_ONE_IN = 5
VALID_ONE_IN = 5
BRIGHTEST = 16.0
SIDE = 8
INK = 0.25  # a pixel above this belongs to the stroke
MISSING = -1


def is_test(index: int) -> bool:
    """Whether image `index` is kept for testing, as in the recipe `digits`."""
    return crc32(str(index).encode()) % TEST_ONE_IN == 0


def is_valid(index: int) -> bool:
    """Whether training image `index` is held out, to choose settings by."""
    return crc32(f"valid/{index}".encode()) % VALID_ONE_IN == 0


def has_label(index: int, label: Label) -> bool:
    """Whether a training image is among those that were annotated with `label`."""
    return crc32(f"{label}/{index}".encode()) % 3 == 0


def box_of(image: Tensor) -> Tensor:
    """Top, bottom, left and right of the stroke in `[1, 8, 8]`, as shares of the image's side."""
    rows, columns = (torch.nonzero(image[0].amax(dim) > INK).flatten() for dim in (1, 0))
    return torch.stack([rows[0], rows[-1] + 1, columns[0], columns[-1] + 1]) / SIDE


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images `[1, 8, 8]` from 0 (paper) to 1 (ink), and one of their labels.

    Args:
        images: `[image, 1, 8, 8]`.
        label_of: the label of an image, given as it is read, and its number among `images`.
        max_shift: every time it is read, an image is moved by up to so many pixels in both directions, at random.
    """

    def __init__(self, images: Tensor, label_of: Callable[[Tensor, int], Tensor], *, max_shift: int = 0) -> None:
        self.padded = F.pad(images, (max_shift, max_shift, max_shift, max_shift))
        self.label_of = label_of
        self.max_shift = max_shift
        labels = torch.stack([label_of(image, index).double().sum() for index, image in enumerate(images)])
        self.fingerprint = f"{crc32(self.padded.numpy().tobytes() + labels.numpy().tobytes()):08x}"

    def __len__(self) -> int:
        return len(self.padded)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(2 * self.max_shift + 1, (2,)).tolist() if self.max_shift else (0, 0)
        image = self.padded[index, :, down : down + SIDE, right : right + SIDE]
        return image, self.label_of(image, index)


def digits(split: Split, label: Label, *, max_shift: int = 0) -> Digits:
    """The images of a split that have a label.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    if split not in ("train", "test", "fit", "valid") or label not in ("class", "parity", "box"):
        raise ArgumentError(f"`split` and `label` must be of {Split} and {Label}, but are {split}, {label}.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo") from error
    pixels, shown = load_digits(return_X_y=True)
    whole = split in ("test", "valid")
    of_split = {
        "train": lambda n: not is_test(n),
        "test": is_test,
        "fit": lambda n: not is_test(n) and not is_valid(n),
        "valid": lambda n: not is_test(n) and is_valid(n),
    }[split]
    chosen = [n for n in range(len(shown)) if of_split(n) and (whole or has_label(n, label))]
    images = torch.tensor(pixels[chosen] / BRIGHTEST, dtype=torch.float32).view(-1, 1, SIDE, SIDE)
    classes = torch.tensor(shown[chosen], dtype=torch.int64)
    if label == "box":
        return Digits(images, lambda image, _: box_of(image), max_shift=max_shift)
    if label == "parity":
        lacks = torch.tensor([not whole and crc32(f"lacks/{n}".encode()) % 2 == 0 for n in chosen])
        classes = torch.where(lacks, MISSING, classes % 2)
    return Digits(images, lambda _, index: classes[index], max_shift=max_shift)
