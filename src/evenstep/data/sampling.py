"""Cuts epochs into global batches, and these into micro-batches, as a pure function of (seed, epoch, batch)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast, final, get_args

import numpy as np
from numpy.typing import NDArray

from evenstep.arguments import check_one_of_two, require_count, require_word
from evenstep.data.batch_sizes import BatchSizes, Unit, batch_sizes
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

_LENGTH_WINDOW = 8192


class EpochBatches(NamedTuple):
    """The global batches of one epoch, each made when it is asked for.

    Args:
        key: of all that is drawn while its samples are read.
    """

    visited: Order
    num_samples: int
    begins: Sequence[int]
    key: int
    limit: int | None = None

    @property
    def num_batches(self) -> int:
        """Number of global batches of the epoch."""
        return len(self.begins) if self.limit is None else min(len(self.begins), self.limit)

    def batch(self, number: int) -> NDArray[np.int64]:
        """The samples of global batch `number`."""
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
        fits: which samples are used, `[num_samples]`; None for all.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int | Sequence[tuple[int, int]] | None = None,
        global_batch_tokens: int | Sequence[tuple[int, int]] | None = None,
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
        whole = {"global_batch_size": global_batch_size, "global_batch_tokens": global_batch_tokens}
        pairs = {
            name: batch_sizes(name, value, batch_size_unit)
            for name, value in whole.items()
            if isinstance(value, list | tuple)
        }
        self.num_samples = num_samples
        self.global_batch_size, self.global_batch_tokens = (
            value if value is None or name in pairs else require_count(name, value) for name, value in whole.items()
        )
        self.micro_batch_size, self.micro_batch_tokens = (
            None if value is None else require_count(name, value)
            for name, value in (("micro_batch_size", micro_batch_size), ("micro_batch_tokens", micro_batch_tokens))
        )
        self.shuffle, self.packed = shuffle, packed
        self.batch_size_multiple = require_count("batch_size_multiple", batch_size_multiple)
        check_one_of_two("global_batch_size", "global_batch_tokens", self.global_batch_size, self.global_batch_tokens)
        self.sizes: BatchSizes | None = next(iter(pairs.values()), None)
        if "global_batch_tokens" in pairs and batch_size_unit == "updates":
            raise ArgumentError(
                "`global_batch_tokens` can change by epochs only, since an epoch is cut by tokens as a whole; set "
                "`batch_size_unit` to 'epochs', or let `global_batch_size` change.",
                field="global_batch_tokens",
            )
        tokens = self.sizes.sizes if "global_batch_tokens" in pairs and self.sizes else (self.global_batch_tokens,)
        budgets = [one for one in (*tokens, self.micro_batch_tokens) if isinstance(one, int)]
        require_word("oversized", oversized, get_args(Oversized))
        if budgets and lengths is None:
            raise ArgumentError("`lengths` must be given with a token budget, but is None.", field="lengths")
        self.curriculum_epochs = curriculum_epochs
        self.measured = None if lengths is None or not budgets else measure(lengths, num_samples)
        self.fits = (
            None if self.measured is None else fitting(self.measured, max_tokens=min(budgets), oversized=oversized)
        )
        self.length_window = _LENGTH_WINDOW if length_window is None else length_window

    @property
    def num_skipped(self) -> int:
        return 0 if self.fits is None else self.num_samples - int(np.count_nonzero(self.fits))

    def epoch(self, epoch: int, *, seed: int, limit: int | None = None) -> EpochBatches:
        """The first `limit` global batches of `epoch`: a pure function of (seed, epoch)."""
        shuffle = self.shuffle and epoch >= self.curriculum_epochs
        visited = order_of(self.num_samples, seed=seed, epoch=epoch, shuffle=shuffle)
        epoch_key = key(seed, "sample", epoch)
        if self.global_batch_tokens is None and self.fits is None:
            begins = self._begins(self.num_samples, epoch, limit)
            return EpochBatches(visited, self.num_samples, begins, epoch_key, limit)
        samples = visited(0, self.num_samples)
        if self.fits is not None:
            samples = samples[self.fits[samples]]
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
        if self.packed and self.micro_batch_tokens is not None:
            assert self.measured is not None
            bins = pack(self.measured[samples], max_tokens=self.micro_batch_tokens, max_samples=self.micro_batch_size)
            return [samples[places].tolist() for places in bins]
        if self.micro_batch_tokens is not None:
            assert self.measured is not None
            samples = samples[np.argsort(self.measured[samples], kind="stable")]
            edges = cut_by_tokens(
                self.measured[samples],
                max_tokens=self.micro_batch_tokens,
                max_samples=self.micro_batch_size,
                multiple=self.batch_size_multiple,
            )
        else:
            edges = cut_by_count(len(samples), self.micro_batch_size or len(samples))
        indices: list[int] = samples.tolist()
        return [indices[start:end] for start, end in pairwise(edges)]

    def _cut_by_tokens(
        self, samples: NDArray[np.int64], max_tokens: int, shuffle_key: int | None
    ) -> tuple[NDArray[np.int64], list[int]]:
        assert self.measured is not None
        if self.packed:  # the order needs no lengths that are alike
            return samples, cut_by_sum(self.measured[samples], max_tokens=max_tokens)
        if shuffle_key is not None:
            samples = group_by_length(samples, self.measured, window=self.length_window)
        edges = cut_by_tokens(self.measured[samples], max_tokens=max_tokens, multiple=self.batch_size_multiple)
        if shuffle_key is not None:
            samples, edges = shuffle_batches(samples, edges, shuffle_key=shuffle_key)
        return samples, edges
