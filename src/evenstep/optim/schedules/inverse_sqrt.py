"""A warm-up, then a slow fall without an end, so that a run may be made longer at any time."""

from dataclasses import dataclass
from math import sqrt
from typing import final

from evenstep.optim.schedules.schedule import LrSchedule, check_count, check_warmup_fits, warmup_factor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(LrSchedule):
    """Warm-up to 1, then inversely to the square root of the update's number.

        u / W          for u < W
        √(s / u)       from then on, s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up, which also scale the fall; 0 and 1 both mean none.

    Raises:
        ArgumentError: a number out of its range.

    Reference: Vaswani et al., "Attention is all you need", NeurIPS 2017, eq. 3, with a peak of 1.

    >>> [InverseSqrt(warmup_updates=4)(update, None) for update in (2, 4, 16)]
    [0.5, 1.0, 0.5]
    """

    warmup_updates: int = 0

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        return sqrt(max(self.warmup_updates, 1) / update)

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, updates)
