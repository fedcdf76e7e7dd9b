"""Pure functions that cut an order of samples into batches, by count or by tokens, and divide them between ranks.

A cut is a list of edges: batch b holds the places from `edges[b]` up to, not including, `edges[b + 1]`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenstep.arguments import require_whole
from evenstep.data.order import scatter
from evenstep.errors import ArgumentError, DataError

Lengths: TypeAlias = Sequence[int] | NDArray[Any] | Tensor | Callable[[int], int]
Sizes = int | Sequence[tuple[int, int]] | None  # one, or pairs of a global batch of the run, from 1, and a size


def measure(lengths: Lengths, num_samples: int, *, max_tokens: int) -> NDArray[np.int64]:
    """The lengths of all samples, `[num_samples]` in tokens; DataError if one does not fit the budget alone."""
    given: Any = [lengths(index) for index in range(num_samples)] if callable(lengths) else lengths
    array = np.asarray(given)
    if array.shape != (num_samples,) or array.dtype.kind not in "iu" or array.min() < 0:
        raise ArgumentError(
            f"`lengths` must be {num_samples} whole numbers of tokens, one for each sample, but is {array.dtype} "
            f"{list(array.shape)}; measure the dataset that is trained on.",
            field="lengths",
        )
    over = np.flatnonzero(array > max_tokens)
    if len(over):
        raise DataError(
            f"{len(over)} of {len(array)} samples are longer than the {max_tokens} tokens of a batch, the first is "
            f"{over[0]} of {array[over[0]]}; raise the budget, or leave them out by torch's `Subset`."
        )
    return array.astype(np.int64)


def cut_by_count(num_samples: int, size: int | None, *, ranks: int) -> list[int]:
    """Cut into batches of `size`; the last may be short. None cuts evenly, a batch for each rank.

    >>> cut_by_count(5, 2, ranks=2), cut_by_count(5, None, ranks=2), cut_by_count(1, None, ranks=2)
    ([0, 2, 4, 5], [0, 2, 5], [0, 1])
    """
    if size is not None:
        return [*range(0, num_samples, size), num_samples]
    parts = max(1, min(num_samples, ranks))
    return [num_samples * part // parts for part in range(parts + 1)]


def cut_by_tokens(
    lengths: Sequence[int] | NDArray[np.int64], *, max_tokens: int, max_samples: int | None = None
) -> list[int]:
    """Cut greedily, in order, into batches of longest × count ≤ `max_tokens`; no sample may be longer.

    >>> cut_by_tokens([3, 3, 5, 2, 2, 2], max_tokens=10)
    [0, 2, 4, 6]
    """
    values: list[int] = np.asarray(lengths).tolist()
    most = len(values) if max_samples is None else max_samples
    edges: list[int] = []
    begin = longest = 0
    for place, length in enumerate(values):
        if length > longest:
            longest = length
        if longest * (place + 1 - begin) > max_tokens or place - begin == most:
            edges.append(place)
            begin = place
            longest = length
    return [0, *edges, len(values)]


def cut_by_sum(lengths: Sequence[int] | NDArray[np.int64], *, max_tokens: int) -> list[int]:
    """Cut greedily, in order, into batches of Σ lengths ≤ `max_tokens`, for samples packed into rows.

    >>> cut_by_sum([3, 3, 5, 2, 2, 2], max_tokens=8)
    [0, 2, 4, 6]
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    edges, done = [0], 0
    while edges[-1] < len(ends):
        edges.append(int(ends.searchsorted(done + max_tokens, side="right")))
        done = int(ends[edges[-1] - 1])
    return edges


def pack(
    lengths: Sequence[int] | NDArray[np.int64], *, max_tokens: int, max_samples: int | None = None
) -> list[list[int]]:
    """Put each sample, longest first, into the first of the bins that has room for it; gives the bins' places.

    First-fit decreasing (D. S. Johnson, "Near-optimal bin packing algorithms", 1973). Equally long samples stay in
    their order.

    >>> pack([2, 3, 1], max_tokens=4)
    [[1, 2], [0]]
    """
    values = np.asarray(lengths, dtype=np.int64)
    room = np.full(len(values), max_tokens)  # of the bins; as many as there may be
    bins: list[list[int]] = []
    for place in np.argsort(-values, kind="stable").tolist():
        number = int(np.argmax(room >= values[place]))
        if number == len(bins):
            bins.append([])
        bins[number].append(place)
        room[number] = -1 if len(bins[number]) == max_samples else room[number] - values[place]
    return bins


def group_by_length(samples: NDArray[np.int64], lengths: NDArray[np.int64], *, window: int) -> NDArray[np.int64]:
    """Sort each stretch of `window` samples by length, so that a batch's samples are about equally long.

    >>> group_by_length(np.array([5, 6, 7, 8]), np.array([9, 4, 7, 1]), window=2).tolist()
    [6, 5, 8, 7]
    """
    stretches = [
        begin + np.argsort(lengths[begin : begin + window], kind="stable") for begin in range(0, len(samples), window)
    ]
    return samples[np.concatenate(stretches)]


def shuffle_batches(
    samples: NDArray[np.int64], edges: list[int], *, shuffle_key: int
) -> tuple[NDArray[np.int64], list[int]]:
    """Put the batches of a cut in another order; returns the samples and the edges."""
    sizes = np.diff(np.asarray(edges, dtype=np.int64))
    places = np.argsort(scatter(shuffle_key, np.arange(len(sizes), dtype=np.int64)), kind="stable")
    moved = [samples[edges[place] : edges[place + 1]] for place in places.tolist()]
    return np.concatenate([samples[:0], *moved]), [0, *np.cumsum(sizes[places]).tolist()]


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
    """Edges of the global batches of an epoch, the last of them at or after the last sample.

    >>> sizes = (1, 2), (4, 4)
    >>> [list(cut_by_pairs(sizes, 10, epoch)) for epoch in range(2)]  # batches of 2, 2, 2, 4 and 4, 4, 2 samples
    [[0, 2, 4, 6, 10], [0, 4, 8, 12]]
    """
    number = 1  # of the epoch's first batch in the run
    for _ in range(epoch):
        if number >= pairs[-1][0]:
            break
        number += min(len(_cut_from(number, pairs, num_samples)) - 1, limit or num_samples)
    return _cut_from(number, pairs, num_samples)


def _cut_from(number: int, pairs: Sequence[tuple[int, int]], num_samples: int) -> Sequence[int]:
    if number >= pairs[-1][0]:  # all that follow are of one size
        size = pairs[-1][1]
        return range(0, num_samples + size, size)
    edges = [0]
    while edges[-1] < num_samples:
        size = pairs[bisect_right(pairs, number, key=itemgetter(0)) - 1][1]
        edges.append(edges[-1] + size)
        number += 1
    return edges


def largest(size: Sizes) -> int | None:
    """The largest of the sizes of global batches over a run."""
    return max(one for _, one in size) if isinstance(size, Sequence) else size
