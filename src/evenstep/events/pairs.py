"""Pairs (sum, weight) of metrics: read from their devices, added up over micro-batches and ranks, and divided.

Sums are exact and rounded once: a rank's pair goes with what its own rounding has left out. So a value has the same
bits whichever rank has put what, and however often.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, compress, count, repeat, zip_longest
from math import fsum, inf, isfinite, isnan, nan
from operator import is_not, itemgetter, neg
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.errors import ArgumentError, clause
from evenstep.events.meters import Seen
from evenstep.events.series import Record

Number: TypeAlias = "float | Tensor"
Entry: TypeAlias = tuple[int, str, Number, Number]
Pairs: TypeAlias = dict[tuple[int, str], Any]  # (sum, weight, …) under (update, name), or what a meter has seen

COUNT = "\0"
"""Begins what a count is kept under: no metric has such a name."""
_ONE = 2  # a sum and its weight
_sum_and_weight, _weight = itemgetter(2, 3), itemgetter(3)  # of an entry; of a record


def pairs_of(pending: Sequence[Entry]) -> Pairs:
    """What was put, by (update, name): (sum, weight), or (sum, weight, rest of the sum, rest of the weight, …).

    Raises:
        ArgumentError: for a tensor that is not one number.

    >>> pairs_of([(1, "loss", 1.0, 2.0), (1, "loss", 2.0**-60, 1.0), (1, "lr", 0.5, 1.0)])
    {(1, 'loss'): (1.0, 3.0, 8.673617379884035e-19, 0.0), (1, 'lr'): (0.5, 1.0)}
    """
    pairs: Pairs = {}
    several: dict[tuple[int, str], list[float]] = {}
    numbers = _read(pending)
    for (update, name, _, _), total, weight in zip(pending, numbers[::2], numbers[1::2], strict=True):
        key = update, name
        if not 0.0 <= weight < inf:
            weight = nan  # which no other weight hides, here or on another rank, so that all of them say so
        if key not in pairs:
            pairs[key] = total, weight
        elif key in several:
            several[key] += total, weight
        else:
            several[key] = [*pairs[key], total, weight]
    for key, each in several.items():
        sums = zip_longest(_parts(each[::2]), _parts(each[1::2]), fillvalue=0.0)
        pairs[key] = tuple(chain.from_iterable(sums))
    return pairs


def joined(everybody: Sequence[Pairs]) -> Pairs:
    """The pairs of all ranks, in which each has all numbers that any rank's has; of meters it is the first's."""
    together = everybody[0].copy()
    for theirs in everybody[1:]:
        for key, one in theirs.items():
            if type(one) is not Seen:
                together[key] = *together.get(key, ()), *one
    return together


def means(pairs: Pairs) -> list[Record]:
    """Σ sums / Σ weights of each, but of those whose weight is 0.

    Raises:
        ArgumentError: for a weight that is negative or not finite.
    """
    new = tuple.__new__  # what a named tuple calls by way of Python code: here are as many as updates and metrics
    records: list[Record] = [
        new(Record, (*key, total / weight if len(pair) == _ONE else _quotient(pair), weight))
        for key, pair in pairs.items()
        if type(pair) is not Seen
        for total, weight in (pair if len(pair) == _ONE else (0.0, fsum(pair[1::2])),)
        if weight
    ]
    if any(map(isnan, map(_weight, records))):
        record = next(one for one in records if isnan(one.weight))
        raise ArgumentError(
            f"metric `{record.name}` of update {record.update} has a weight that is negative or not finite; a weight "
            f"is how many units the sum covers, such as tokens: give 0 where there are none, and a sign to the sum.",
            field=record.name,
        )
    return records


def pack(scalars: Sequence[Tensor]) -> Tensor:
    """0-dim tensors of one device, of any types, as one tensor [len(scalars)] there; exact for integers below 2⁵³.

    >>> pack([torch.tensor(0.5), torch.tensor(2**40 + 1)])
    tensor([5.0000e-01, 1.0995e+12], dtype=torch.float64)
    """
    wide = torch.float32 if scalars[0].device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    with torch.no_grad():
        return torch.stack([one if one.is_floating_point() else one.to(wide) for one in scalars])


def _read(pending: Sequence[Entry]) -> list[float]:
    numbers: list[Any] = list(chain.from_iterable(map(_sum_and_weight, pending)))
    elsewhere: dict[torch.device, list[int]] = {}
    for index in compress(count(), map(is_not, map(type, numbers), repeat(float))):  # most are, and cost no bytecode
        number = numbers[index]
        if isinstance(number, Tensor) and number.dim():
            name, shape = pending[index // 2][1].removeprefix(COUNT), list(number.shape)
            raise ArgumentError(
                f"metric `{name}` must be put as 0-dim tensors, but one has shape {shape}; sum it.", field=name
            )
        if not isinstance(number, Tensor) or number.is_cpu:
            try:
                numbers[index] = float(number.item() if isinstance(number, Tensor) else number)
            except (TypeError, ValueError, OverflowError) as error:
                name = pending[index // 2][1].removeprefix(COUNT)
                raise ArgumentError(
                    f"metric `{name}` must be put as real numbers, but one is {said(number)} ({clause(error)}); sum "
                    f"what are several, and give `float(…)` of it.",
                    field=name,
                ) from error
        else:
            elsewhere.setdefault(number.device, []).append(index)
    for indices in elsewhere.values():
        for index, number in zip(indices, pack([numbers[index] for index in indices]).tolist(), strict=True):
            numbers[index] = number
    return numbers


def _parts(values: list[float]) -> list[float]:
    rounded = sum(values)
    if not isfinite(rounded) or not fsum([*values, -rounded]):
        return [rounded]
    parts = [fsum(values)]
    while left := fsum([*values, *map(neg, parts)]):
        parts.append(left)
    return parts


def _quotient(pair: tuple[float, ...]) -> float:
    totals, weights = pair[::2], pair[1::2]
    rounded = sum(totals) / sum(weights)
    if not isfinite(rounded):
        return rounded
    return float(sum(map(Fraction, totals), Fraction(0)) / sum(map(Fraction, weights), Fraction(0)))
