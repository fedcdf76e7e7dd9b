"""The bytes of the Python standard library's own source, cut into windows, and a bigram model to be beaten.

Every newcomer has this text already: it came with Python. Files, not bytes, are split into train and valid by a
hash of their path, so that no file is seen on both sides. It is not a benchmark corpus: its bytes differ from one
Python version to the next.
"""

import os
import sysconfig
from pathlib import Path
from typing import Literal, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep import Data, Hook
from evenstep.data import ReadOptions
from evenstep.errors import ArgumentError, DataError
from evenstep.events import EvaluateEvent, TrainEvent

Split = Literal["train", "valid"]

NUM_BYTES = 256
SEPARATOR = b"\0"
VALID_ONE_IN = 20
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def split_of(path: str) -> Split:
    """The split of a file: valid for one path in 20, by crc32(path) mod 20 = 0.

    Args:
        path: relative to the library's root, with forward slashes.
    """
    return "valid" if crc32(os.fsencode(path)) % VALID_ONE_IN == 0 else "train"


def source_files(root: Path) -> list[str]:
    """The .py files under `root` in a fixed order, as sorted relative paths with forward slashes; no tests.

    Raises:
        DataError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read ({error}); make it readable, or give another folder of Python source "
            "as `root`."
        ) from error

    found: list[str] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def read_split(split: Split, root: Path | None = None) -> bytes:
    """The files of one split, one after the other, each followed by a zero byte.

    Args:
        root: folder of Python source; None is the standard library's.

    Raises:
        DataError: a file cannot be read, or there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: list[bytes] = []
    for path in source_files(root):
        if split_of(path) != split:
            continue
        try:
            parts += [(root / path).read_bytes(), SEPARATOR]
        except OSError as error:
            raise DataError(
                f"{root / path} is part of the {split} split but cannot be read ({error}); make it readable, "
                "or give another folder of Python source as `root`."
            ) from error
    if not parts:
        raise DataError(f"{root} holds no .py file of the {split} split; give a folder of Python source as `root`.")
    return b"".join(parts)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, one after the other: `context` bytes to read and, shifted by one, those to predict.

    No byte is predicted twice. `fingerprint` identifies text and cut, so that a resume on another text is refused.

    Args:
        text: the bytes to cut.
        context: bytes per window.
        limit: keep only this many windows, evenly spread over the text; None keeps all.
    """

    def __init__(self, text: bytes, *, context: int, limit: int | None = None) -> None:
        if context < 1:
            raise ArgumentError(f"`context` must be at least 1 byte, but is {context}.")
        available = (len(text) - 1) // context
        if available < 1:
            raise ArgumentError(
                f"`text` must hold at least {context + 1} bytes, one window of {context} and its last target, but has "
                f"{len(text)}; lower `context`."
            )
        count = available if limit is None else limit
        if not 1 <= count <= available:
            raise ArgumentError(
                f"`limit` must be between 1 and the {available} windows of {context} bytes that the text has, but is "
                f"{limit}; change it, or lower `context`."
            )
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.starts = [number * available // count * context for number in range(count)]
        self.lengths = [context] * count
        self.fingerprint = f"{crc32(text):08x}/{context}"

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[context]`."""
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def windows(split: Split, *, context: int, limit: int | None = None, root: Path | None = None) -> Windows:
    """The windows of one split; see `read_split` and `Windows`."""
    return Windows(read_split(split, root), context=context, limit=limit)


class ByteBigram:
    """The chance of a byte after the one before it, counted: p(b | a) = (n_ab + α) / (n_a + 256 α).

    Args:
        text: what to count in.
        alpha: added to every count, so that no byte is impossible.

    >>> round(ByteBigram(b"ababab", alpha=1.0).bits(torch.tensor([97]), torch.tensor([98])), 2)  # log2(259 / 4)
    6.02
    """

    def __init__(self, text: bytes, *, alpha: float = 0.1) -> None:
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        pairs = torch.bincount(codes[:-1] * NUM_BYTES + codes[1:], minlength=NUM_BYTES**2)
        counts = pairs.view(NUM_BYTES, NUM_BYTES).double() + alpha
        self.surprise = -(counts / counts.sum(1, keepdim=True)).log2()

    def bits(self, inputs: Tensor, targets: Tensor) -> float:
        """−Σ log₂ p(target | input), in bits, over integer tensors of one shape."""
        return float(self.surprise[inputs, targets].sum())


def printable(text: bytes) -> str:
    """ASCII that any terminal shows; other bytes than line ends are escaped.

    >>> print(printable(b"a\\tb\\xff"))
    a\\x09b\\xff
    """
    return "".join(chr(code) if 32 <= code < 127 or code == ord("\n") else f"\\x{code:02x}" for code in text)


class BigramAndSample(Hook):
    """At the end, print how model and bigram model do on the same bytes, and what the model writes by itself.

    Args:
        evaluation: name of the evaluation whose bytes are predicted.
        prompt: what the sample begins with.
        num_bytes: length of the sample.
        temperature: below 1 the sample is plainer than the text, above 1 wilder.
        seed: of the sample.
        root: folder of Python source to count bigrams in, if it isn't the standard library's.
    """

    def __init__(
        self,
        *,
        evaluation: str = "valid",
        prompt: str = "class ",
        num_bytes: int = 240,
        temperature: float = 0.6,
        seed: int = 1,
        root: Path | None = None,
    ) -> None:
        self.evaluation = evaluation
        self.prompt = prompt.encode()
        self.num_bytes = num_bytes
        self.temperature = temperature
        self.seed = seed
        self.root = root
        self.evaluated: EvaluateEvent | None = None

    def before_train(self, event: TrainEvent) -> None:
        if self.evaluation not in self.trainer.evaluations:
            raise ArgumentError(
                f"`evaluation` of {self.name} must be one of the run's evaluations "
                f"({', '.join(self.trainer.evaluations) or 'it has none'}), but is {self.evaluation!r}; change it, or "
                f"add `data.evaluations.{self.evaluation}`."
            )

    def after_evaluate(self, event: EvaluateEvent) -> None:
        if event.name == self.evaluation and event.metrics:
            self.evaluated = event

    def after_train(self, event: TrainEvent) -> None:
        if event.outcome == "failed":
            return
        print(f"\n{self.shown_bits()}{self.shown_sample()}\n", flush=True)

    def shown_bits(self) -> str:
        """Model and bigram model beside each other; nothing of a run that was stopped before its first evaluation."""
        if self.evaluated is None:
            return ""
        return (
            f"{self.evaluation} bits per byte, after update {self.evaluated.update}\n"
            f"  model   {self.evaluated.metrics[f'{self.evaluation}/bits_per_byte']:.3f}\n"
            f"  bigram  {self.bigram_bits_per_byte():.3f}\n"
        )

    def bigram_bits_per_byte(self) -> float:
        """Of a bigram model of the train split, on the very batches of the evaluation."""
        bigram = ByteBigram(read_split("train", self.root))
        bits, num_bytes = 0.0, 0
        for batch in cast(Data, self.trainer.evaluations[self.evaluation]).batches(ReadOptions(seed=self.seed)):
            for microbatch in batch.microbatches:
                inputs, targets = cast(tuple[Tensor, Tensor], microbatch.data)
                bits += bigram.bits(inputs, targets)
                num_bytes += targets.numel()
            if batch.ends_epoch:
                break
        return bits / num_bytes

    def shown_sample(self) -> str:
        """The sample with its heading; of a model in stages, why there is none."""
        if not hasattr(self.trainer.model, "generate"):
            return "no sample: this rank holds some stages of the model only"
        return f"a sample, after {printable(self.prompt)!r}\n{self.sample()}"

    def sample(self) -> str:
        """What the model writes after the prompt, indented."""
        generator = torch.Generator().manual_seed(self.seed)
        written = self.trainer.model.generate(
            self.prompt, num_bytes=self.num_bytes, temperature=self.temperature, generator=generator
        )
        return "\n".join("  | " + line for line in printable(self.prompt + written).splitlines())
