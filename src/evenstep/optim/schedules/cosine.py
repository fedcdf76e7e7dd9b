"""A warm-up, then half a cosine wave down to the end of the run."""

from dataclasses import dataclass
from math import cos, pi
from typing import final

from evenstep.optim.schedules.schedule import Decay


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Decay):
    """Warm-up to 1, then cosine decay, which reaches its end at the last update; no restarts.

        u / W                               for u < W
        e + (1 - e) · (1 + cos(π p)) / 2    from then on, p = (u - s) / (U - s), s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range.

    Reference: Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, eq. 5.

    >>> [Cosine(warmup_updates=2, end_factor=0.0)(update, 4) for update in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    def _remaining(self, progress: float) -> float:
        return (1 + cos(pi * progress)) / 2
