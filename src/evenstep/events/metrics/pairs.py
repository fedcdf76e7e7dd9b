"""Pairs (sum, weight) of metrics: copied when given, read from their devices, added over ranks, and divided.

Sums are exact and rounded once: ranks also send the rest that rounding left out. Bits do not depend on ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, zip_longest
from math import fsum, inf, isfinite, isnan, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.events.metrics.meters import Seen
from evenstep.events.metrics.series import Record

Number: TypeAlias = "float | Tensor"
Entry: TypeAlias = tuple[int, str, Number, Number]
"""Update, name, sum and weight; numbers are floats, or 0-dim tensors of an accelerator."""
Pairs: TypeAlias = dict[tuple[int, str], Any]
"""(sum, weight, rest of the sum, rest of the weight, …) under (update, name); or the `Seen` of a meter."""

COUNT = "\0"
"""First character of a count's key; metrics have no such names."""


def copied(number: Any, name: str) -> Number:
    """`number` as it is now: a float, or for an accelerator a detached copy, for which nothing waits.

    Raises:
        ArgumentError: not one real number.
    """
    if type(number) is float:
        return number
    if isinstance(number, Tensor):
        if number.dim():
            name, shape = name.removeprefix(COUNT), list(number.shape)
            raise ArgumentError(f"metric `{name}` must be one number, but has shape {shape}; sum it.", field=name)
        if not number.is_cpu:
            return number.detach().clone()
        number = (number.detach() if number.requires_grad else number).item()
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError) as error:
        name = name.removeprefix(COUNT)
        raise ArgumentError(f"metric `{name}` must be one real number, but is {number!r}.", field=name) from error


def pairs_of(pending: Sequence[Entry]) -> Pairs:
    """Sums and weights by (update, name), in the order first put."""
    pairs: Pairs = {}
    several: dict[tuple[int, str], list[float]] = {}
    numbers = _read(pending)
    for (update, name, _, _), total, weight in zip(pending, numbers[::2], numbers[1::2], strict=True):
        if not 0.0 <= weight < inf:
            weight = nan  # unlike a negative number it stays visible in every sum, so that all ranks raise
        key = update, name
        if key not in pairs:
            pairs[key] = total, weight
        elif key in several:
            several[key] += total, weight
        else:
            several[key] = [*pairs[key], total, weight]
    for key, each in several.items():
        parts = zip_longest(_parts(each[::2]), _parts(each[1::2]), fillvalue=0.0)
        pairs[key] = tuple(chain.from_iterable(parts))
    return pairs


def joined(everybody: Sequence[Pairs]) -> Pairs:
    """Pairs of all ranks: the numbers of all under each key; of meters the first rank's."""
    together = everybody[0].copy()
    for theirs in everybody[1:]:
        for key, pair in theirs.items():
            if not isinstance(pair, Seen):
                together[key] = *together.get(key, ()), *pair
    return together


def means(pairs: Pairs) -> list[Record]:
    """Σ sums / Σ weights of each metric whose weight is not 0.

    Raises:
        ArgumentError: for a weight that is negative or not finite.
    """
    records: list[Record] = []
    new = tuple.__new__  # a named tuple's own is Python code
    for (update, name), pair in pairs.items():
        if isinstance(pair, Seen):
            continue
        weight = pair[1] if len(pair) == 2 else fsum(pair[1::2])
        if isnan(weight):
            raise ArgumentError(
                f"metric `{name}` of update {update} has a weight that is negative or not finite; give the number of "
                f"units that the sum covers.",
                field=name,
            )
        if weight:
            value = pair[0] / weight if len(pair) == 2 else _quotient(pair)
            records.append(new(Record, (update, name, value, weight)))
    return records


def pack(scalars: Sequence[Tensor]) -> Tensor:
    """0-dim tensors of one device, of any types, as one tensor [len(scalars)] there; exact for integers below 2⁵³."""
    wide = torch.float32 if scalars[0].device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    with torch.no_grad():
        return torch.stack([one if one.is_floating_point() else one.to(wide) for one in scalars])


def _read(pending: Sequence[Entry]) -> list[float]:
    numbers: list[Any] = [number for entry in pending for number in entry[2:]]
    of_devices: dict[torch.device, list[int]] = {}
    for index, number in enumerate(numbers):
        if type(number) is not float:
            of_devices.setdefault(number.device, []).append(index)
    for indices in of_devices.values():
        values = pack([numbers[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return numbers


def _parts(values: list[float]) -> list[float]:
    rounded = sum(values)
    if not isfinite(rounded):
        return [rounded]
    parts = [fsum(values)]
    while rest := fsum([*values, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def _quotient(pair: tuple[float, ...]) -> float:
    totals, weights = pair[::2], pair[1::2]
    rounded = sum(totals) / sum(weights)
    if not isfinite(rounded):
        return rounded
    return float(sum(map(Fraction, totals), Fraction(0)) / sum(map(Fraction, weights), Fraction(0)))
