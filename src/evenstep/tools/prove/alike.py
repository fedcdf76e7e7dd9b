"""Compares the traces of one update that was cut in two ways.

Tensors are compared by samples. Padding to another length makes no difference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.tools.prove.compare import distance
from evenstep.tools.prove.trace import MicrobatchTrace, Values

_APART = {torch.float64: 1e-9, torch.float32: 1e-4}


def order_of(one: Sequence[MicrobatchTrace], other: Sequence[MicrobatchTrace]) -> list[int] | None:
    mine = [number for microbatch in one for number in microbatch.samples]
    theirs = [number for microbatch in other for number in microbatch.samples]
    if not mine or len(set(mine)) != len(mine) or sorted(mine) != sorted(theirs):
        return None
    places = {number: place for place, number in enumerate(mine)}
    return [places[number] for number in theirs]


def apart(one: Sequence[Values], other: Sequence[Values], order: list[int] | None, *, exact: bool) -> str | None:
    """The first place whose values differ; None where all that can be compared are the same."""
    for way in one[0]:
        if not all(way in each for each in (*one, *other)):
            continue
        if _differ([each[way] for each in one], [each[way] for each in other], order, exact=exact):
            return way
    return None


def _differ(one: list[Tensor], other: list[Tensor], order: list[int] | None, *, exact: bool) -> bool:
    if len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True)):
        return any(_far(a, b, exact=exact) for a, b in zip(one, other, strict=True))
    if exact:
        return True
    if len(one) > 1 or len({each.ndim for each in (*one, *other)}) > 1:
        return False  # nothing that can be held against each other
    whole = one[0]
    for dim in range(min(2, whole.ndim)):
        sizes = [each.shape[dim] for each in other]
        if sum(sizes) != whole.shape[dim] or len(other) < 2:
            continue
        if order is not None and len(order) == whole.shape[dim]:
            whole = whole.index_select(dim, torch.tensor(order))
        parts = zip(whole.split(sizes, dim), other, strict=True)
        return any(not _same_but_padding(mine, part) for mine, part in parts)
    return False


def _same_but_padding(one: Tensor, other: Tensor) -> bool:
    if one.shape == other.shape:
        return not _far(one, other, exact=False)
    for is_left in (False, True):
        common = [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
        places = [
            tuple(slice(full - size if is_left else 0, full if is_left else size) for full, size in pairs)
            for pairs in (zip(each.shape, common, strict=True) for each in (one, other))
        ]
        if not _far(one[places[0]], other[places[1]], exact=False) and all(
            each.is_floating_point() or _is_one_value_beyond(each, place)
            for each, place in zip((one, other), places, strict=True)
        ):
            return True
    return False


def _is_one_value_beyond(one: Tensor, place: tuple[slice, ...]) -> bool:
    beyond = torch.ones_like(one, dtype=torch.bool)
    beyond[place] = False
    return len(one[beyond].unique()) < 2


def _far(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    if exact or not one.is_floating_point():
        return not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    scale = max(float(one.double().norm()), 1e-30)
    return distance(torch.nan_to_num(one), torch.nan_to_num(other)) > _APART.get(one.dtype, 1e-2) * scale


def worst(one: Values, other: Values, *, exact: bool) -> str:
    """The name of the tensor that differs most; "" where none does."""
    scale = sum(float(each.double().norm()) ** 2 for each in one.values()) ** 0.5 or 1.0
    found, size = "", 0.0
    for name, value in one.items():
        if name not in other:
            continue
        far = distance(value, other[name])
        if far > (0 if exact else _APART.get(value.dtype, 1e-2) * scale) and far > size:
            found, size = name, far
    return found
