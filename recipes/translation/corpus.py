"""Sentence pairs from the message catalogues of this machine's programs: English and their translations.

Programs carry their translations as gettext catalogues, below /usr/share/locale on most Linux systems. Short messages
of one line are read as bytes; a hash of the English one decides between train and valid. It is not a benchmark corpus:
what is installed differs from machine to machine, and the fingerprint says so.
"""

import gettext
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep.errors import DataError

Split = Literal["train", "valid"]

PAD, BEGIN, END = 256, 257, 258
NUM_TOKENS = 259
VALID_ONE_IN = 20
LOCALE = Path("/usr/share/locale")
CONTEXT_MARK = "\x04"  # gettext puts it between a message's context and the message


@cache
def messages(language: str, root: Path = LOCALE) -> dict[str, str]:
    """The translations of `language`, by the English message; of several the first in order is kept.

    Args:
        language: as gettext names it, such as `de` or `pt_BR`.
        root: folder that holds LANGUAGE/LC_MESSAGES/*.mo.

    Raises:
        DataError: there is no readable catalogue.
    """
    found: dict[str, str] = {}
    for english, translated in sorted(_all_messages(sorted((root / language / "LC_MESSAGES").glob("*.mo")))):
        found.setdefault(english, translated)
    if not found:
        there = sorted(path.parent.name for path in root.glob("*/LC_MESSAGES") if any(path.glob("*.mo")))
        raise DataError(
            f"{root} holds no message catalogue of language '{language}'; there are {', '.join(there) or 'none'}. "
            f"Install some programs' translations (slim images leave them out), or give another folder as `root`."
        )
    return found


def _all_messages(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        try:
            with file.open("rb") as opened:
                catalogue = vars(gettext.GNUTranslations(opened))["_catalog"]
        except (OSError, UnicodeDecodeError):
            continue  # some old catalogues say another encoding than they have: there are others
        for english, translated in catalogue.items():
            if isinstance(english, str):
                yield english.rpartition(CONTEXT_MARK)[2].strip(), translated.strip()


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of short messages as bytes: (English, BEGIN translation END).

    Args:
        split: train, or valid for one English message in 20, by its crc32.
        language: to translate to.
        max_bytes: longest message on either side.
        limit: keep only so many pairs, evenly spread; None keeps all.
        root: folder of the catalogues.
    """

    def __init__(
        self,
        *,
        split: Split,
        language: str = "de",
        max_bytes: int = 48,
        limit: int | None = None,
        root: Path = LOCALE,
    ) -> None:
        pairs = [
            (english, translated)
            for english, translated in sorted(messages(language, root).items())
            if english != translated and "\n" not in english + translated and split_of(english) == split
        ]
        encoded = [(english.encode(), translated.encode()) for english, translated in pairs]
        fitting = [pair for pair in encoded if all(1 <= len(side) <= max_bytes for side in pair)]
        count = len(fitting) if limit is None else min(limit, len(fitting))
        self.pairs = [fitting[number * len(fitting) // count] for number in range(count)]
        if not self.pairs:
            raise DataError(f"no message of the {split} split has at most {max_bytes} bytes; raise `max_bytes`.")
        self.lengths = [max(len(english), len(translated) + 2) for english, translated in self.pairs]
        self.fingerprint = f"{crc32(b''.join(a + b for a, b in self.pairs)):08x}/{len(self.pairs)}"

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        english, translated = self.pairs[index]
        return torch.tensor(list(english)), torch.tensor([BEGIN, *translated, END])


def split_of(english: str) -> Split:
    """The split of a message."""
    return "valid" if crc32(english.encode()) % VALID_ONE_IN == 0 else "train"


def padded(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch, int64: `source` [pairs, longest], `target` [pairs, longest]; each as long as its longest message."""
    source, target = zip(*pairs, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "source": pad(list(source), batch_first=True, padding_value=PAD),
        "target": pad(list(target), batch_first=True, padding_value=PAD),
    }
