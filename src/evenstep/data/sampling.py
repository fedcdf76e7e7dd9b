"""Cuts epochs into global batches, and these into micro-batches, as a pure function of (seed, epoch, batch).

Global batch sizes may change over a run: the order of an epoch stays the same, only the cuts move.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, cast, final, get_args

import numpy as np
from numpy.typing import NDArray

from evenstep.arguments import check_one_of_two, require_count, require_word
from evenstep.data.batch import JSON
from evenstep.data.batching import (
    Lengths,
    Oversized,
    cut_by_count,
    cut_by_sum,
    cut_by_tokens,
    fitting,
    group_by_length,
    measure,
    pack,
    shuffle_batches,
)
from evenstep.data.order import Order, order_of
from evenstep.errors import ArgumentError
from evenstep.keys import key

Unit = Literal["updates", "epochs"]
Sizes = int | Sequence[tuple[int, int]] | None

_LENGTH_WINDOW = 8192


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
    def of(cls, name: str, given: Sequence[tuple[int, int]], unit: Unit) -> "BatchSizes":
        """Sizes from pairs (begin, size), which are counted from 1.

        >>> BatchSizes.of("global_batch_size", [(1, 8), (100, 16)], "updates").as_json
        {'unit': 'updates', 'sizes': [[1, 8], [100, 16]]}
        """
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

    def cut(self, num_samples: int, epoch: int, limit: int | None = None) -> "Begins":
        """Places in the order of an epoch where each of its global batches begins.

        >>> sizes = BatchSizes(begins=(0, 3), sizes=(2, 4), unit="updates")
        >>> [list(sizes.cut(10, epoch)) for epoch in range(2)]  # batches of 2, 2, 2, 4 and 4, 4, 2 samples
        [[0, 2, 4, 6], [0, 4, 8]]
        """
        if self.unit == "epochs":
            return Begins((range(0, num_samples, self.of_epoch(epoch)),))
        return self._cut_from(self._first(num_samples, epoch, limit or num_samples), num_samples)

    def _first(self, num_samples: int, epoch: int, limit: int) -> int:
        number = 0
        for earlier in range(epoch):
            if number >= self.begins[-1]:  # all that follow are of one size
                return number + (epoch - earlier) * min(-(-num_samples // self.sizes[-1]), limit)
            number += min(len(self._cut_from(number, num_samples)), limit)
        return number

    def _cut_from(self, number: int, num_samples: int) -> "Begins":
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
        return Begins(tuple(pieces))

    @property
    def as_json(self) -> dict[str, JSON]:
        """The pairs that they were made of, and their unit."""
        return {"unit": self.unit, "sizes": [[n + 1, size] for n, size in zip(self.begins, self.sizes, strict=True)]}


class Begins(Sequence[int]):
    """Several ranges one after the other, as one sequence that is never written out."""

    def __init__(self, pieces: Sequence[range]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(len(piece) for piece in pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        piece = bisect_right(self._ends, number)
        return self._pieces[piece][number - (self._ends[piece - 1] if piece else 0)]


def largest(size: Sizes) -> int | None:
    """The largest of the sizes of global batches over a run.

    >>> largest(8), largest(((1, 8), (100, 32), (200, 16)))
    (8, 32)
    """
    return max(one for _, one in size) if isinstance(size, Sequence) else size


class EpochBatches(NamedTuple):
    """The global batches of one epoch, each made when it is asked for.

    Args:
        key: of all that is drawn while its samples are read.
    """

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
class Sampling:
    """Every choice that decides which samples make which micro-batch; the samples are measured if need be.

    Args:
        num_samples: of the dataset. All others are as those of `MapData`.

    Attributes:
        sizes: of the global batches, where there are pairs.
        measured: the lengths, `[num_samples]` in tokens; None where there is no token budget.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: Sizes = None,
        global_batch_tokens: Sizes = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        lengths: Lengths | None = None,
        batch_size_multiple: int = 1,
        oversized: Oversized = "error",
        length_window: int | None = None,
        shuffle: bool = True,
        curriculum_epochs: int = 0,
        batch_size_unit: Unit = "updates",
        packed: bool = False,
    ) -> None:
        check_one_of_two("global_batch_size", "global_batch_tokens", global_batch_size, global_batch_tokens)
        require_word("oversized", oversized, get_args(Oversized))
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.global_batch_tokens = global_batch_tokens
        self.micro_batch_size = _count("micro_batch_size", micro_batch_size)
        self.micro_batch_tokens = _count("micro_batch_tokens", micro_batch_tokens)
        self.batch_size_multiple = require_count("batch_size_multiple", batch_size_multiple)
        self.shuffle = shuffle
        self.packed = packed
        self.curriculum_epochs = curriculum_epochs
        self.length_window = _LENGTH_WINDOW if length_window is None else length_window
        self.sizes: BatchSizes | None = None
        name = "global_batch_size" if global_batch_tokens is None else "global_batch_tokens"
        size = global_batch_size if global_batch_tokens is None else global_batch_tokens
        if isinstance(size, list | tuple):
            self.sizes = BatchSizes.of(name, cast("Sequence[tuple[int, int]]", size), batch_size_unit)
        else:
            _count(name, cast("int", size))
        if global_batch_tokens is not None and self.sizes is not None and batch_size_unit == "updates":
            raise ArgumentError(
                "`global_batch_tokens` can change by epochs only, since an epoch is cut by tokens as a whole; set "
                "`batch_size_unit` to 'epochs', or let `global_batch_size` change.",
                field="global_batch_tokens",
            )
        tokens = () if global_batch_tokens is None else self.sizes.sizes if self.sizes else (global_batch_tokens,)
        budgets = cast("list[int]", [one for one in (*tokens, self.micro_batch_tokens) if one is not None])
        if budgets and lengths is None:
            raise ArgumentError("`lengths` must be given with a token budget, but is None.", field="lengths")
        self.measured = None if lengths is None or not budgets else measure(lengths, num_samples)
        self._fits: NDArray[np.bool_] | None = None
        if self.measured is not None:
            self._fits = fitting(self.measured, max_tokens=min(budgets), oversized=oversized)

    @property
    def num_skipped(self) -> int:
        return 0 if self._fits is None else self.num_samples - int(np.count_nonzero(self._fits))

    def epoch(self, epoch: int, *, seed: int, limit: int | None = None) -> EpochBatches:
        """The first `limit` global batches of `epoch`: a pure function of (seed, epoch)."""
        shuffle = self.shuffle and epoch >= self.curriculum_epochs
        visited = order_of(self.num_samples, seed=seed, epoch=epoch, shuffle=shuffle)
        epoch_key = key(seed, "sample", epoch)
        if self._fits is None:
            return EpochBatches(
                visited, self.num_samples, self._begins(self.num_samples, epoch, limit), epoch_key, limit
            )
        samples = visited(0, self.num_samples)
        samples = samples[self._fits[samples]]
        if self.global_batch_tokens is None:
            begins = self._begins(len(samples), epoch, limit)
        else:
            tokens = self.sizes.of_epoch(epoch) if self.sizes else cast("int", self.global_batch_tokens)
            samples, edges = self._cut_by_tokens(samples, tokens, key(seed, "batches", epoch) if shuffle else None)
            begins = edges[:-1]

        def visit(start: int, stop: int) -> NDArray[np.int64]:
            return samples[start:stop]

        return EpochBatches(visit, len(samples), begins, epoch_key, limit)

    def _begins(self, num_samples: int, epoch: int, limit: int | None) -> Sequence[int]:
        if self.sizes is not None:
            return self.sizes.cut(num_samples, epoch, limit)
        return range(0, num_samples, cast("int", self.global_batch_size))

    def microbatches(self, samples: NDArray[np.int64]) -> list[list[int]]:
        """Cut one global batch: by tokens (packed, or sorted by length first, to pad little), by count, or not."""
        max_tokens, max_samples = self.micro_batch_tokens, self.micro_batch_size
        if max_tokens is None:
            edges = cut_by_count(len(samples), max_samples or len(samples))
        else:
            lengths = cast("NDArray[np.int64]", self.measured)[samples]
            if self.packed:
                bins = pack(lengths, max_tokens=max_tokens, max_samples=max_samples)
                return [samples[places].tolist() for places in bins]
            order = np.argsort(lengths, kind="stable")
            samples = samples[order]
            multiple = self.batch_size_multiple
            edges = cut_by_tokens(lengths[order], max_tokens=max_tokens, max_samples=max_samples, multiple=multiple)
        indices: list[int] = samples.tolist()
        return [indices[start:end] for start, end in pairwise(edges)]

    def _cut_by_tokens(
        self, samples: NDArray[np.int64], max_tokens: int, shuffle_key: int | None
    ) -> tuple[NDArray[np.int64], list[int]]:
        measured = cast("NDArray[np.int64]", self.measured)
        if self.packed:  # the order needs no lengths that are alike
            return samples, cut_by_sum(measured[samples], max_tokens=max_tokens)
        if shuffle_key is not None:
            samples = group_by_length(samples, measured, window=self.length_window)
        edges = cut_by_tokens(measured[samples], max_tokens=max_tokens, multiple=self.batch_size_multiple)
        if shuffle_key is not None:
            samples, edges = shuffle_batches(samples, edges, shuffle_key=shuffle_key)
        return samples, edges


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else require_count(name, value)
