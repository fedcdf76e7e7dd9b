"""A text as characters, cut into windows: Shakespeare if it is at hand, else the manual that comes with Python.

The first nine tenths of a text train and the last tenth is evaluated. A file `input.txt` beside this one is the text:
"tiny Shakespeare", say (README). Without it the text is Python's reference manual, which every Python carries as
`pydoc_data.topics`: English prose of 0.5 MB, whose losses are not those of Shakespeare.
"""

from pathlib import Path
from typing import Literal, get_args
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep.errors import ArgumentError, DataError

Split = Literal["train", "valid"]

HERE = Path(__file__).parent
FILE = "input.txt"
TRAIN_SHARE = 0.9


def manual() -> str:
    """Python's reference manual: its chapters in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(file: str | None = None) -> str:
    """The text: of `file`, else of `input.txt` beside this recipe, else Python's manual.

    Raises:
        DataError: a file is given and cannot be read as UTF-8.
    """
    path = HERE / FILE if file is None else HERE / file
    if file is None and not path.is_file():
        return manual()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text ({error}); give a file in UTF-8 as `file`.") from error


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: `context` characters to read and, shifted by one, those to predict.

    Args:
        text: all of it; its characters, sorted, are numbered, so that both splits have the same numbers.
        split: the first nine tenths or the last tenth.
        context: characters per window.
        stride: from the beginning of one window to the next. 1 gives windows at every character, to be drawn from;
            `context` gives each character once, to be evaluated.

    >>> data = Characters("to be, or not to be" * 10, split="valid", context=4, stride=4)
    >>> data.decode(data[0][0]), data.decode(data[0][1])
    ('to b', 'o be')
    """

    def __init__(self, text: str, *, split: Split, context: int, stride: int) -> None:
        if split not in get_args(Split):
            raise ArgumentError(f'`split` must be "train" or "valid", but is {split!r}.')
        if context < 1 or stride < 1:
            raise ArgumentError(f"`context` and `stride` must be at least 1, but are {context} and {stride}.")
        border = int(len(text) * TRAIN_SHARE)
        part = text[:border] if split == "train" else text[border:]
        if len(part) <= context:
            raise ArgumentError(
                f"the {split} part of `text` must have more than the {context} characters of a window, but has "
                f"{len(part)}; give a longer text, or lower `context`."
            )
        self.alphabet = "".join(sorted(set(text)))
        if len(self.alphabet) > 256:
            raise ArgumentError(f"`text` must have at most 256 different characters, but has {len(self.alphabet)}.")
        number_of = {character: number for number, character in enumerate(self.alphabet)}
        self.codes = torch.tensor([number_of[character] for character in part], dtype=torch.uint8)
        self.context = context
        self.stride = stride
        self.fingerprint = f"{crc32(text.encode()):08x}/{split}/{context}/{stride}"

    def __len__(self) -> int:
        return (len(self.codes) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[context]`."""
        start = index * self.stride
        window = self.codes[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def encode(self, text: str) -> list[int]:
        """The numbers of characters; those that the text does not have are left out."""
        return [self.alphabet.index(character) for character in text if character in self.alphabet]

    def decode(self, codes: Tensor) -> str:
        """The characters of numbers `[characters]`."""
        return "".join(self.alphabet[code] for code in codes.tolist())


def characters(split: Split, *, context: int, stride: int, file: str | None = None) -> Characters:
    """The windows of one split; see `read_text` and `Characters`."""
    return Characters(read_text(file), split=split, context=context, stride=stride)
