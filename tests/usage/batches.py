"""Kinds of batches and of losses: each trains as one batch of plain PyTorch for every cut, or is refused."""

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

FEATURES, CLASSES, SAMPLES, GLOBAL, MICRO = 5, 3, 24, 12, 4
Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of batch.

    Args:
        name: for people.
        collate: makes a batch of samples, each of x [length, features] and a class.
        read: gives x as [samples, features] (the mean over the length) and the classes.
        cut: whether it can be cut in two by default.
        works: whether its number of samples is known without `weight`.
    """

    name: str
    collate: Callable[[Sequence[Sample]], Any]
    read: Callable[[Any], tuple[Tensor, Tensor]]
    cut: bool = True
    works: bool = True


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


def unbound(batch: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([mean(x) for x in batch["x"].unbind()]), batch["y"]


BATCHES = (
    Kind("tuple", rows, lambda b: b),
    Kind("list of columns", lambda s: list(rows(s)), lambda b: (b[0], b[1])),
    Kind(
        "dict",
        lambda s: dict(zip("xy", rows(s), strict=True)) | {"names": [str(i) for i in range(len(s))], "k": 3},
        lambda b: (b["x"], b["y"]),
    ),
    Kind("named tuple", lambda s: Columns(*rows(s)), lambda b: (b.x, b.y)),
    Kind("dataclass, frozen", lambda s: Record(*rows(s)), lambda b: (b.x, b.y)),
    Kind("mapping", lambda s: Encoding(dict(zip("xy", rows(s), strict=True))), lambda b: (b["x"], b["y"])),
    Kind(
        "numpy arrays",
        lambda s: tuple(np.asarray(one) for one in rows(s)),
        lambda b: (torch.from_numpy(np.array(b[0])), torch.from_numpy(np.array(b[1]))),
    ),
    Kind("list of samples", list, rows),
    Kind("lists of unequal tensors", lambda s: ([x for x, _ in s], [y for _, y in s]), read_list),
    Kind("zipped tuples", lambda s: tuple(zip(*s, strict=True)), read_list),
    Kind("PackedSequence", packed, read_packed, cut=False),
    Kind("nested tensor, strided", nested(torch.strided), unbound, cut=False),
    Kind("nested tensor, jagged", nested(torch.jagged), unbound, cut=False),
    Kind("sparse tensor", lambda s: (rows(s)[0].to_sparse(), rows(s)[1]), lambda b: (b[0].to_dense(), b[1]), cut=False),
    Kind("a table that all samples share", table, lambda b: (b["x"] * b["table"][0], b["y"])),
    Kind(
        "features first",
        lambda s: {"x": rows(s)[0].t().contiguous(), "y": rows(s)[1]},
        lambda b: (b["x"].t(), b["y"]),
        cut=False,
    ),
    Kind("own class", lambda s: Own(*rows(s)), lambda b: (b.x, b.y), cut=False),
    Kind(
        "features first, every tensor",
        lambda s: rows(s)[0].t().contiguous(),
        lambda b: (b.t(), b.t()[:, 0] > 0),
        cut=False,
        works=False,
    ),
)

GOOD_LOSSES = ("sum", "sum, several metrics", "Loss.of_mean", "Loss.of_mean, late weight", "late weight")
REFUSED_LOSSES = (
    "mean",
    "mean, late weight",
    "one per sample",
    "in-batch negatives",
    "a penalty once per batch",
    "a weight of 1",
    "a count that is not the weight",
    "a float",
    "a dict",
    "a tuple",
    "None",
)


def samples_of(count: int = SAMPLES) -> list[Sample]:
    """Samples of unequal lengths, in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + int(n) for n in torch.randint(1, 5, (count,), generator=generator)]
    return [
        (torch.randn(length, FEATURES, dtype=torch.float64, generator=generator), torch.tensor(number % CLASSES))
        for number, length in enumerate(lengths)
    ]
