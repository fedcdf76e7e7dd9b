"""Distance of two runs, and the bound that rounding sets.

The bound is measured: ten times the effect of summing gradients in another order and changing each by a rounding.
Where steps magnify rounding beyond `CAP`, the first gradients are compared instead.
"""

import math
from dataclasses import dataclass
from typing import final

import torch

from evenstep.tools.prove.run import Ended
from evenstep.tools.prove.state import Difference, difference, distance, norm

TIMES = 10.0  # of the measured effect of rounding
TERMS = 100.0  # roundings of a sum that a measurement of 0 may hide
CAP = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}


def moved(run: Ended) -> float:
    """Distance from the begin of a run to its end."""
    return math.hypot(*(distance(run.begin[name], one) for name, one in run.end.items() if one.is_floating_point()))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Quantity by which runs are compared, and the largest difference that rounding makes, as a share of `scale`."""

    what: str
    bound: float
    scale: float
    by_gradient: bool = False

    def __call__(self, run: Ended, reference: Ended) -> Difference:
        if self.by_gradient:
            return difference(reference.gradient, run.gradient, self.scale)
        return difference(reference.end, run.end, self.scale)


def measure_of(reference: Ended, reordered: Ended, *, updates: int) -> Measure:
    """Measure the bound, from a run whose gradients were summed in another order and rounded."""
    formats = {one.dtype for one in reference.end.values() if one.is_floating_point()}
    narrow = next(one for one in reversed(CAP) if one in formats or one is torch.float64)
    eps = torch.finfo(narrow).eps
    scale = moved(reference)
    if 0 < scale < math.inf:
        noise = difference(reference.end, reordered.end, scale).value + eps * (norm(reference.end) / scale + TERMS)
        if TIMES * noise <= CAP[narrow]:
            return Measure(what=f"parameters, {updates} updates", bound=TIMES * noise, scale=scale)
    size = norm(reference.gradient)
    if not 0 < size < math.inf:
        raise ValueError("nothing can be compared: training moves no parameter, and the gradient is 0 or not finite.")
    noise = difference(reference.gradient, reordered.gradient, size).value + eps * TERMS
    return Measure(what="gradient, update 1", bound=min(TIMES * noise, CAP[narrow]), scale=size, by_gradient=True)
