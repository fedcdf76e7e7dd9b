"""Distance of two runs, and the bound that rounding sets.

The bound is measured: ten times the effect of summing gradients in another order and moving each by a rounding. Where
steps magnify rounding beyond `CAP`, the first gradients are compared instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from evenstep.tools.prove.subject import Ended

TIMES = 10.0  # what is allowed of what a reordering was measured to make
TERMS = 100.0  # roundings of a sum that a measurement of 0 may hide
CAP = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two runs are apart."""

    value: float
    of: str


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], scale: float) -> Difference:
    """The largest difference of tensors of the same names, as a share of `scale`.

    >>> difference({"a": torch.ones(4)}, {"a": torch.zeros(4)}, 4.0)
    Difference(value=0.5, of='a')
    """
    worst = Difference(value=0.0, of="")
    for name, value in one.items():
        if not value.is_floating_point():
            continue
        apart = distance(value, other[name]) / scale if name in other else math.inf
        if not apart <= worst.value:
            worst = Difference(value=apart if apart == apart else math.inf, of=name)
    return worst


def distance(one: Tensor, other: Tensor) -> float:
    """‖a - b‖₂ in float64; inf where their shapes differ."""
    if one.shape != other.shape:
        return math.inf
    apart = one.double() - other.double()
    return float(torch.where(one == other, torch.zeros_like(apart), apart).norm())


def norm(tensors: Mapping[str, Tensor]) -> float:
    """‖v‖₂ over all of them."""
    return math.hypot(*(float(one.double().norm()) for one in tensors.values() if one.is_floating_point()))


def moved(run: Ended) -> float:
    return math.hypot(*(distance(run.begin[name], one) for name, one in run.end.items() if one.is_floating_point()))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What runs are compared by, and how far they may be apart.

    Args:
        bound: as a share of `scale`.
        by_gradient: whether by the gradient of the first update.
    """

    what: str
    bound: float
    scale: float
    by_gradient: bool = False

    def __call__(self, run: Ended, reference: Ended) -> Difference:
        if self.by_gradient:
            return difference(reference.gradient, run.gradient, self.scale)
        return difference(reference.end, run.end, self.scale)


def measure_of(reference: Ended, reordered: Ended, *, updates: int) -> Measure:
    formats = {one.dtype for one in reference.end.values() if one.is_floating_point()}
    narrow = next(one for one in reversed(CAP) if one in formats or one is torch.float64)
    eps, scale = torch.finfo(narrow).eps, moved(reference)
    if scale > 0 and math.isfinite(scale):
        noise = difference(reference.end, reordered.end, scale).value + eps * (norm(reference.end) / scale + TERMS)
        if TIMES * noise <= CAP[narrow]:
            return Measure(
                what=f"parameters, {updates} update{'s' if updates > 1 else ''}", bound=TIMES * noise, scale=scale
            )
    size = norm(reference.gradient)
    if not 0 < size < math.inf:
        raise ValueError(
            "training moves no parameter, and there is no gradient: nothing can be compared. Look at the loss, and at "
            "the learning rate of the first updates (`--updates` compares more)."
        )
    noise = difference(reference.gradient, reordered.gradient, size).value + eps * TERMS
    bound = min(TIMES * noise, CAP[narrow])
    return Measure(what="gradient, update 1", bound=bound, scale=size, by_gradient=True)
