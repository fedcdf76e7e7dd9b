"""Cuts epochs into global batches, and these into micro-batches, as a pure function of (seed, epoch, batch).

Global batch sizes may change over a run: the order of an epoch stays the same, only the cuts move.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, cast, final, get_args
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from evenstep.arguments import check_one_of_two, require_whole, require_word
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

Sizes = int | Sequence[tuple[int, int]] | None
Weights = Sequence[float] | Tensor | WeightedRandomSampler | None

_LENGTH_WINDOW = 8192  # shuffled samples that are sorted by length together


def pairs_of(name: str, given: Sizes) -> tuple[tuple[int, int], ...]:
    """Pairs (number of the global batch in the run, from 1; size from there on) of one number or of pairs."""
    if not isinstance(given, Sequence):
        return ((1, require_whole(name, given)),)
    begins = [begin for begin, _ in given]
    ordered = begins[:1] == [1] and all(one < other for one, other in pairwise(begins))
    if not ordered or any(size < 1 for _, size in given):
        raise ArgumentError(
            f"`{name}` must be a whole number, or pairs of an update from 1 on, in order, and a size, such as "
            f"[(1, 64), (1000, 128)], but is {given!r}.",
            field=name,
        )
    return tuple((begin, size) for begin, size in given)


def cut_by_pairs(
    pairs: Sequence[tuple[int, int]], num_samples: int, epoch: int, limit: int | None = None
) -> Sequence[int]:
    """Places in the order of an epoch where each of its global batches begins.

    >>> sizes = (1, 2), (4, 4)
    >>> [list(cut_by_pairs(sizes, 10, epoch)) for epoch in range(2)]  # batches of 2, 2, 2, 4 and 4, 4, 2 samples
    [[0, 2, 4, 6], [0, 4, 8]]
    """
    number = 1  # of the epoch's first batch in the run
    for _ in range(epoch):
        if number >= pairs[-1][0]:
            break
        number += min(len(_cut_from(number, pairs, num_samples)), limit or num_samples)
    return _cut_from(number, pairs, num_samples)


def _cut_from(number: int, pairs: Sequence[tuple[int, int]], num_samples: int) -> Sequence[int]:
    if number >= pairs[-1][0]:  # all that follow are of one size
        return range(0, num_samples, pairs[-1][1])
    begins: list[int] = []
    place = 0
    while place < num_samples:
        begins.append(place)
        place += pairs[bisect_right(pairs, number + len(begins) - 1, key=itemgetter(0)) - 1][1]
    return begins


def largest(size: Sizes) -> int | None:
    """The largest of the sizes of global batches over a run."""
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
    global_batch_tokens: int | None = None
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    lengths: Lengths | None = None
    oversized: Oversized = "error"
    shuffle: bool = True
    packed: bool = False
    sampling: Weights = None

    def __post_init__(self) -> None:
        check_one_of_two("global_batch_size", "global_batch_tokens", self.global_batch_size, self.global_batch_tokens)
        require_word("oversized", self.oversized, get_args(Oversized))
        for name in ("global_batch_tokens", "micro_batch_size", "micro_batch_tokens"):
            if getattr(self, name) is not None:
                setattr(self, name, require_whole(name, getattr(self, name)))
        if self.global_batch_size is not None:
            self._pairs = pairs_of("global_batch_size", self.global_batch_size)
        budgets = [one for one in (self.global_batch_tokens, self.micro_batch_tokens) if one is not None]
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
        """Options that choose the samples of an update; under `cut`, the samples of its micro-batches."""
        size = self.global_batch_size
        fingerprint: dict[str, JSON] = {
            "num_samples": self.num_samples,
            "global_batch_size": [list(pair) for pair in size] if isinstance(size, Sequence) else size,
            "global_batch_tokens": self.global_batch_tokens,
            "num_skipped": self.num_skipped,
            "packed": self.packed and self.global_batch_tokens is not None,
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
            begins = cut_by_pairs(self._pairs, num_samples, epoch, limit)
            return EpochBatches(visited, num_samples, begins, epoch_key, limit)
        samples = visited(0, num_samples)
        samples = samples[self._fits[samples % self.num_samples]]
        if self.global_batch_tokens is None:
            begins = cut_by_pairs(self._pairs, len(samples), epoch, limit)
        else:
            shuffle_key = key(seed, "batches", epoch) if self.shuffle else None
            samples, edges = self._cut_by_tokens(samples, self.global_batch_tokens, shuffle_key)
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
