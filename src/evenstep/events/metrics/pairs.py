"""Pairs (sum, weight) of metrics: copied when given, read from their devices, added over ranks, and divided.

Sums are exact and rounded once: ranks also send the rest that rounding left out. Bits do not depend on ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, zip_longest
from math import fsum, inf, isfinite, isnan, nan
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.errors import ArgumentError

Number: TypeAlias = "float | Tensor"
Entry: TypeAlias = tuple[int, str, Number, Number]
"""Update, name, sum and weight; numbers are floats, or 0-dim tensors of an accelerator."""
Pairs: TypeAlias = dict[tuple[int, str], Any]
"""(sum, weight, rest of the sum, rest of the weight, …) under (update, name); or the `Seen` of a meter."""

COUNT = "\0"
"""First character of a count's key; metrics have no such names."""


class Record(NamedTuple):
    """Value of a metric at an update, and the weight behind it: value = Σ sums / Σ weights."""

    update: int
    name: str
    value: float
    weight: float


def copied(number: Any, name: str) -> Number:
    """`number` as it is now: a float, or for an accelerator a detached copy, for which nothing waits."""
    if type(number) is float:
        return number
    if isinstance(number, Tensor) and not number.dim() and not number.is_cpu:
        return number.detach().clone()
    try:
        return float(number.item() if isinstance(number, Tensor) else number)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        name = name.removeprefix(COUNT)
        raise ArgumentError(f"metric `{name}` must be one real number, but is {said(number)}.", field=name) from error


def pairs_of(pending: Sequence[Entry]) -> Pairs:
    """Sums and weights by (update, name), in the order first put."""
    given: dict[tuple[int, str], list[float]] = {}
    numbers = _read(pending)
    for (update, name, _, _), total, weight in zip(pending, numbers[::2], numbers[1::2], strict=True):
        if not 0.0 <= weight < inf:
            weight = nan  # unlike a negative number it stays visible in every sum, so that all ranks raise
        given.setdefault((update, name), []).extend((total, weight))
    return {key: tuple(each) if len(each) == 2 else _exact(each) for key, each in given.items()}


def joined(everybody: Sequence[Pairs]) -> Pairs:
    """Pairs of all ranks: the numbers of all under each key."""
    together: Pairs = {}
    for theirs in everybody:
        for key, pair in theirs.items():
            if isinstance(pair, tuple):
                together[key] = *together.get(key, ()), *pair
    return together


def means(pairs: Pairs) -> list[Record]:
    """Σ sums / Σ weights of each metric whose weight is not 0."""
    records: list[Record] = []
    for (update, name), pair in pairs.items():
        weight = pair[1] if len(pair) == 2 else fsum(pair[1::2])
        if isnan(weight):
            raise ArgumentError(
                f"metric `{name}` of update {update} has a weight that is negative or not finite; give the number of "
                f"units that the sum covers.",
                field=name,
            )
        if weight:
            value = pair[0] / weight if len(pair) == 2 else _quotient(pair)
            records.append(Record(update, name, value, weight))
    return records


def _read(pending: Sequence[Entry]) -> list[float]:
    """Numbers of all entries; those of one device are read at once, exact for integers below 2⁵³."""
    numbers: list[Any] = [number for entry in pending for number in entry[2:]]
    of_devices: dict[torch.device, list[int]] = {}
    for index, number in enumerate(numbers):
        if type(number) is not float:
            of_devices.setdefault(number.device, []).append(index)
    for device, indices in of_devices.items():
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        scalars = [numbers[index] for index in indices]
        stacked = torch.stack([one if one.is_floating_point() else one.to(wide) for one in scalars])
        for index, value in zip(indices, stacked.tolist(), strict=True):
            numbers[index] = value
    return numbers


def _exact(numbers: list[float]) -> tuple[float, ...]:
    """Several pairs as one, and the rests of its rounded numbers."""
    return tuple(chain.from_iterable(zip_longest(_parts(numbers[::2]), _parts(numbers[1::2]), fillvalue=0.0)))


def _parts(values: list[float]) -> list[float]:
    rounded = sum(values)
    if not isfinite(rounded):
        return [rounded]
    parts = [fsum(values)]
    while rest := fsum([*values, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def _quotient(pair: tuple[float, ...]) -> float:
    totals = pair[::2]
    weights = pair[1::2]
    rounded = sum(totals) / sum(weights)
    if not isfinite(rounded):
        return rounded
    return float(sum(map(Fraction, totals), Fraction(0)) / sum(map(Fraction, weights), Fraction(0)))
