"""Cuts epochs into global batches, and these into micro-batches, as a pure function of (seed, epoch, batch).

Global batch sizes may change over a run: the order of an epoch stays the same, only the cuts move.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, NamedTuple, cast, final, get_args
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from evenstep.arguments import check_one_of_two, require_count, require_word
from evenstep.data.batch import JSON
from evenstep.data.batching import (
    Lengths,
    Oversized,
    cut_by_count,
    cut_by_sum,
    cut_by_tokens,
    cut_evenly,
    fitting,
    group_by_length,
    measure,
    pack,
    shuffle_batches,
)
from evenstep.data.order import Draws, Order, order_of
from evenstep.errors import ArgumentError
from evenstep.keys import key

Unit = Literal["updates", "epochs"]
Sizes = int | Sequence[tuple[int, int]] | None
Weights = Sequence[float] | Tensor | WeightedRandomSampler | None

_LENGTH_WINDOW = 8192  # shuffled samples that are sorted by length together


class BatchSizes(NamedTuple):
    """Sizes of the global batches of a run.

    Args:
        begins: the global batch of the run, or the epoch, from 0, that each size begins with; the first is 0.
        sizes: in samples or tokens.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    unit: Unit

    @classmethod
    def of(cls, name: str, given: Sizes, unit: Unit) -> "BatchSizes":
        """Sizes from one number, or from pairs (begin, size), which are counted from 1."""
        if not isinstance(given, Sequence):
            return cls((0,), (require_count(name, given),), "epochs")
        begins = [begin for begin, _ in given]
        ordered = begins[:1] == [1] and all(one < other for one, other in pairwise(begins))
        if not ordered or any(size < 1 for _, size in given):
            raise ArgumentError(
                f"`{name}` must be a whole number, or pairs of a number of {unit} from 1 on, in order, and a size, "
                f"such as [(1, 64), (1000, 128)], but is {given!r}.",
                field=name,
            )
        return cls(tuple(begin - 1 for begin in begins), tuple(size for _, size in given), unit)

    def of_epoch(self, epoch: int) -> int:
        """The size in an epoch, where they change by epochs."""
        return self.sizes[bisect_right(self.begins, epoch) - 1]

    def cut(self, num_samples: int, epoch: int, limit: int | None = None) -> Sequence[int]:
        """Places in the order of an epoch where each of its global batches begins.

        >>> sizes = BatchSizes(begins=(0, 3), sizes=(2, 4), unit="updates")
        >>> [list(sizes.cut(10, epoch)) for epoch in range(2)]  # batches of 2, 2, 2, 4 and 4, 4, 2 samples
        [[0, 2, 4, 6], [0, 4, 8]]
        """
        if self.unit == "epochs":
            return range(0, num_samples, self.of_epoch(epoch))
        number = 0  # of the epoch's first batch in the run
        for _ in range(epoch):
            if number >= self.begins[-1]:
                break
            number += min(len(self._cut_from(number, num_samples)), limit or num_samples)
        return self._cut_from(number, num_samples)

    def _cut_from(self, number: int, num_samples: int) -> Sequence[int]:
        if number >= self.begins[-1]:  # all that follow are of one size
            return range(0, num_samples, self.sizes[-1])
        pieces: list[range] = []
        place = 0
        while place < num_samples:
            segment = bisect_right(self.begins, number) - 1
            size = self.sizes[segment]
            count = -(-(num_samples - place) // size)
            if segment + 1 < len(self.begins):
                count = min(count, self.begins[segment + 1] - number)
            pieces.append(range(place, place + count * size, size))
            place += count * size
            number += count
        return list(chain(*pieces))


def largest(size: Sizes) -> int | None:
    """The largest of the sizes of global batches over a run.

    >>> largest(8), largest(((1, 8), (100, 32), (200, 16)))
    (8, 32)
    """
    return max(one for _, one in size) if isinstance(size, Sequence) else size


class EpochBatches(NamedTuple):
    """The global batches of one epoch; `key` seeds the random numbers of its samples."""

    visited: Order
    num_samples: int
    begins: Sequence[int]
    key: int
    limit: int | None

    @property
    def num_batches(self) -> int:
        return len(self.begins) if self.limit is None else min(len(self.begins), self.limit)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Samples of global batch `number`."""
        end = self.begins[number + 1] if number + 1 < len(self.begins) else self.num_samples
        return self.visited(self.begins[number], end)


@final
@dataclass(kw_only=True)
class Sampling:
    """Options of `MapData` that choose the samples of each micro-batch."""

    num_samples: int
    global_batch_size: Sizes = None
    global_batch_tokens: Sizes = None
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    lengths: Lengths | None = None
    oversized: Oversized = "error"
    shuffle: bool = True
    batch_size_unit: Unit = "updates"
    packed: bool = False
    sampling: Weights = None

    def __post_init__(self) -> None:
        check_one_of_two("global_batch_size", "global_batch_tokens", self.global_batch_size, self.global_batch_tokens)
        require_word("oversized", self.oversized, get_args(Oversized))
        for name in ("micro_batch_size", "micro_batch_tokens"):
            if getattr(self, name) is not None:
                setattr(self, name, require_count(name, getattr(self, name)))
        by_tokens = self.global_batch_tokens is not None
        name = "global_batch_tokens" if by_tokens else "global_batch_size"
        self._sizes = BatchSizes.of(name, getattr(self, name), self.batch_size_unit)
        if by_tokens and self._sizes.unit == "updates":
            raise ArgumentError(
                "`global_batch_tokens` can change by epochs only; set `batch_size_unit` to 'epochs', or let "
                "`global_batch_size` change.",
                field="global_batch_tokens",
            )
        budgets = [*self._sizes.sizes] if by_tokens else []
        budgets += [] if self.micro_batch_tokens is None else [self.micro_batch_tokens]
        if budgets and self.lengths is None:
            raise ArgumentError("`lengths` must be given with a token budget, but is None.", field="lengths")
        self.measured = measure(self.lengths, self.num_samples) if budgets and self.lengths is not None else None
        self._fits: NDArray[np.bool_] | None = None
        if self.measured is not None:
            self._fits = fitting(self.measured, max_tokens=min(budgets), oversized=self.oversized)
        self.draws = None if self.sampling is None else Draws.of(self.sampling, self.num_samples, self._fits)

    @property
    def num_skipped(self) -> int:
        return 0 if self._fits is None else self.num_samples - int(np.count_nonzero(self._fits))

    @property
    def epoch_size(self) -> int:
        """Number of samples of an epoch, those that are left out included."""
        return self.num_samples if self.draws is None else self.draws.num_samples

    def fingerprint(self) -> dict[str, JSON]:
        """Options that choose the samples of an update; `cut` holds those of its micro-batches."""
        size, tokens = (
            cast("JSON", given if not isinstance(given, Sequence) else [self.batch_size_unit, *map(list, given)])
            for given in (self.global_batch_size, self.global_batch_tokens)
        )
        fingerprint: dict[str, JSON] = {
            "num_samples": self.num_samples,
            "global_batch_size": size,
            "global_batch_tokens": tokens,
            "num_skipped": self.num_skipped,
            "packed": self.packed and tokens is not None,
            "shuffle": self.shuffle,
            "lengths": None if self.measured is None else crc32(self.measured.data),
            "cut": {"micro_batch_size": self.micro_batch_size, "micro_batch_tokens": self.micro_batch_tokens},
        }
        return fingerprint if self.draws is None else {**fingerprint, "draws": self.draws.fingerprint()}

    def epoch(self, epoch: int, *, seed: int, limit: int | None = None) -> EpochBatches:
        """The first `limit` global batches of `epoch`: a pure function of (seed, epoch)."""
        visited = order_of(self.num_samples, seed=seed, epoch=epoch, shuffle=self.shuffle)
        if self.draws is not None:
            visited = self.draws.order(key(seed, "draws", epoch))
        num_samples = self.epoch_size
        epoch_key = key(seed, "sample", epoch)
        if self._fits is None:
            begins = self._sizes.cut(num_samples, epoch, limit)
            return EpochBatches(visited, num_samples, begins, epoch_key, limit)
        samples = visited(0, num_samples)
        samples = samples[self._fits[samples % self.num_samples]]
        if self.global_batch_tokens is None:
            begins = self._sizes.cut(len(samples), epoch, limit)
        else:
            shuffle_key = key(seed, "batches", epoch) if self.shuffle else None
            samples, edges = self._cut_by_tokens(samples, self._sizes.of_epoch(epoch), shuffle_key)
            begins = edges[:-1]

        def visit(start: int, stop: int) -> NDArray[np.int64]:
            return samples[start:stop]

        return EpochBatches(visit, len(samples), begins, epoch_key, limit)

    def microbatches(self, samples: NDArray[np.int64], ranks: int = 1) -> list[list[int]]:
        """Cut one global batch: by tokens (packed, or sorted by length first, to pad little), by count, or evenly."""
        max_tokens, max_samples = self.micro_batch_tokens, self.micro_batch_size
        if max_tokens is not None:
            lengths = self._lengths_of(samples)
            if self.packed:
                bins = pack(lengths, max_tokens=max_tokens, max_samples=max_samples)
                return [samples[places].tolist() for places in bins]
            order = np.argsort(lengths, kind="stable")
            samples = samples[order]
            edges = cut_by_tokens(lengths[order], max_tokens=max_tokens, max_samples=max_samples)
        elif max_samples is not None:
            edges = cut_by_count(len(samples), max_samples)
        else:
            edges = cut_evenly(len(samples), ranks)
        indices: list[int] = samples.tolist()
        return [indices[start:end] for start, end in pairwise(edges)]

    def _lengths_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return cast("NDArray[np.int64]", self.measured)[samples % self.num_samples]

    def _cut_by_tokens(
        self, samples: NDArray[np.int64], max_tokens: int, shuffle_key: int | None
    ) -> tuple[NDArray[np.int64], list[int]]:
        if self.packed:  # the order needs no lengths that are alike
            return samples, cut_by_sum(self._lengths_of(samples), max_tokens=max_tokens)
        if shuffle_key is not None:
            samples = group_by_length(samples, self._lengths_of(samples), window=_LENGTH_WINDOW)
        edges = cut_by_tokens(self._lengths_of(samples), max_tokens=max_tokens)
        if shuffle_key is not None:
            samples, edges = shuffle_batches(samples, edges, shuffle_key=shuffle_key)
        return samples, edges
