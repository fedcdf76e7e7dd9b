"""The battery of batches and losses, as data: what a batch can be made of, what of a loss, and what becomes of it.

Each row says whether it works (the right weight, the right halves, the gradient of one float64 batch for every cut,
also after out-of-memory) or asks (the message that a person gets instead). The tests run every row.
"""

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

FEATURES, CLASSES, SAMPLES, GLOBAL, MICRO = 5, 3, 24, 12, 4
Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of batch.

    Args:
        name: for people.
        collate: makes a batch of samples, each of x [length, features] and a class.
        read: gives x as [samples, features] (the mean over the length) and the classes.
        outcome: whether it "works", or "asks" for what only the user knows.
        cut: whether it can be cut in two by default.
        note: for readers of the table.
        asks: what the message says, where it asks.
    """

    name: str
    collate: Callable[[Sequence[Sample]], Any]
    read: Callable[[Any], tuple[Tensor, Tensor]]
    outcome: Literal["works", "asks"] = "works"
    cut: bool = True
    note: str = ""
    asks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A kind of loss.

    Args:
        name: for people.
        outcome: whether it "works", or "asks".
        note: for readers of the table.
        asks: what the message says, where it asks.
    """

    name: str
    outcome: Literal["works", "asks"] = "works"
    note: str = ""
    asks: str = ""


Columns = namedtuple("Columns", "x y")


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    y: Tensor
    source: str = "made"
    seen: int = dataclasses.field(default=0, init=False)


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`."""

    def to(self, device: Any) -> "Encoding":
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Own:
    """A batch class of somebody's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> "Own":
        return Own(self.x.to(device), self.y.to(device))


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


def rows(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    return torch.stack([mean(x) for x, _ in samples]), torch.stack([y for _, y in samples])


def packed(samples: Sequence[Sample]) -> tuple[PackedSequence, Tensor]:
    return pack_sequence([x for x, _ in samples], enforce_sorted=False), rows(samples)[1]


def read_packed(batch: Any) -> tuple[Tensor, Tensor]:
    padded, lengths = pad_packed_sequence(batch[0], batch_first=True)
    return padded.sum(1) / lengths[:, None], batch[1]


def nested(layout: torch.layout) -> Callable[[Sequence[Sample]], Any]:
    return lambda samples: {
        "x": torch.nested.as_nested_tensor([x for x, _ in samples], layout=layout),
        "y": rows(samples)[1],
    }


def read_list(batch: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([mean(x) for x in batch[0]]), torch.stack(list(batch[1]))


def table(samples: Sequence[Sample]) -> dict[str, Tensor]:
    x, y = rows(samples)
    return {"table": torch.ones(7, FEATURES, dtype=x.dtype), "x": x, "y": y}


BATCHES = (
    Kind(name="tuple", collate=rows, read=lambda b: b),
    Kind(name="list of columns", collate=lambda s: list(rows(s)), read=lambda b: (b[0], b[1])),
    Kind(
        name="dict",
        collate=lambda s: dict(zip("xy", rows(s), strict=True)) | {"names": [str(i) for i in range(len(s))], "k": 3},
        read=lambda b: (b["x"], b["y"]),
        note="lists of strings and numbers are cut as well",
    ),
    Kind(name="named tuple", collate=lambda s: Columns(*rows(s)), read=lambda b: (b.x, b.y)),
    Kind(name="dataclass, frozen", collate=lambda s: Record(*rows(s)), read=lambda b: (b.x, b.y)),
    Kind(
        name="BatchEncoding-like mapping",
        collate=lambda s: Encoding(dict(zip("xy", rows(s), strict=True))),
        read=lambda b: (b["x"], b["y"]),
        note="any `UserDict`",
    ),
    Kind(
        name="numpy arrays",
        collate=lambda s: tuple(np.asarray(one) for one in rows(s)),
        read=lambda b: (torch.from_numpy(np.array(b[0])), torch.from_numpy(np.array(b[1]))),
    ),
    Kind(name="list of samples", collate=lambda s: list(s), read=lambda b: rows(b), note="where the loader made it"),
    Kind(
        name="lists of unequal tensors",
        collate=lambda s: ([x for x, _ in s], [y for _, y in s]),
        read=read_list,
        note="as detection has them",
    ),
    Kind(name="zipped tuples", collate=lambda s: tuple(zip(*s, strict=True)), read=read_list),
    Kind(name="PackedSequence", collate=packed, read=read_packed, cut=False, asks="only you know how to cut"),
    Kind(
        name="nested tensor, strided",
        collate=nested(torch.strided),
        read=lambda b: (torch.stack([mean(x) for x in b["x"].unbind()]), b["y"]),
        cut=False,
        asks="only you know how to cut",
    ),
    Kind(
        name="nested tensor, jagged",
        collate=nested(torch.jagged),
        read=lambda b: (torch.stack([mean(x) for x in b["x"].unbind()]), b["y"]),
        cut=False,
        asks="only you know how to cut",
    ),
    Kind(
        name="sparse tensor",
        collate=lambda s: (rows(s)[0].to_sparse(), rows(s)[1]),
        read=lambda b: (b[0].to_dense(), b[1]),
        cut=False,
        asks="only you know how to cut",
    ),
    Kind(name="a table that all samples share", collate=table, read=lambda b: (b["x"] * b["table"][0], b["y"])),
    Kind(
        name="features first",
        collate=lambda s: {"x": rows(s)[0].t().contiguous(), "y": rows(s)[1]},
        read=lambda b: (b["x"].t(), b["y"]),
        cut=False,
        note="right weight by the loader's count; cut only by `Task.split`",
        asks=r"has the \d+ samples in dim 1",
    ),
    Kind(
        name="own class",
        collate=lambda s: Own(*rows(s)),
        read=lambda b: (b.x, b.y),
        cut=False,
        note="right weight by the loader's count; cut only by `Task.split`",
        asks="it is a Own, which only you know how to cut",
    ),
    Kind(
        name="features first, every tensor",
        collate=lambda s: rows(s)[0].t().contiguous(),
        read=lambda b: (b.t(), b.t()[:, 0] > 0),
        outcome="asks",
        cut=False,
        note="`weight` must be given",
        asks=r"does not tell how many it holds: \[5, 4\], of which the loader made 4 samples; override `weight`",
    ),
)

LOSSES = (
    LossKind(name="sum"),
    LossKind(name="sum, several metrics", note="as (sum, weight)"),
    LossKind(name="Loss.of_mean", note="a mean with its count"),
    LossKind(name="Loss.of_mean, late weight"),
    LossKind(name="late weight"),
    LossKind(name="mean", outcome="asks", asks=r"`Classify\.loss` gives a mean, and must give the sum"),
    LossKind(name="mean, late weight", outcome="asks", asks=r"`Classify\.loss` gives a mean"),
    LossKind(
        name="one per sample", outcome="asks", asks=r"shape \[4\] and torch\.float64 .*`\.sum\(\)` of one loss per"
    ),
    LossKind(name="in-batch negatives", outcome="asks", asks="depends on the micro-batch as a whole"),
    LossKind(name="a penalty once per batch", outcome="asks", asks=r"adds 2\.5 once for each batch"),
    LossKind(name="a weight of 1", outcome="asks", asks=r"the weights of its two halves are 1 \+ 1"),
    LossKind(name="a count that is not the weight", outcome="asks", asks=r"mean over 8 units .* gives 4"),
    LossKind(name="a float", outcome="asks", asks=r"gave float .*without `\.item\(\)`"),
    LossKind(name="a dict", outcome="asks", asks="gave dict"),
    LossKind(name="a tuple", outcome="asks", asks="gave tuple"),
    LossKind(name="None", outcome="asks", asks="gave None"),
)


def samples_of(count: int = SAMPLES) -> list[Sample]:
    """Samples of unequal lengths, in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + int(n) for n in torch.randint(1, 5, (count,), generator=generator)]
    return [
        (torch.randn(length, FEATURES, dtype=torch.float64, generator=generator), torch.tensor(number % CLASSES))
        for number, length in enumerate(lengths)
    ]
