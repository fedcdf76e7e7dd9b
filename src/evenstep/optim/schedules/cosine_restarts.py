"""A warm-up, then half cosine waves one after the other, each begun at the top again."""

from dataclasses import dataclass
from math import cos, pi
from typing import final

from evenstep.arguments import require_number
from evenstep.optim.schedules.schedule import (
    LrSchedule,
    check_count,
    check_end_factor,
    check_shrink,
    check_warmup_fits,
    warmup_factor,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CosineRestarts(LrSchedule):
    """Warm-up to 1, then periods of cosine decay; each begins at the full LR, or at a smaller one than the last.

        u / W                                    for u < W
        kⁱ · (e + (1 - e) · (1 + cos(π p)) / 2)  from then on, p = (u - s - b_i) / T_i in [0, 1), s = max(W, 1)

    T_i = T · mⁱ is the length of period i = 0, 1, … and b_i = T_0 + … + T_{i-1} its begin, so the first update of a
    period has its full LR.

    Args:
        period_updates: T, updates of the first period.
        period_factor: m, how many times longer each period is than the one before it.
        shrink: k, what the LR of each period is multiplied by, compared with the one before it.
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        end_factor: e, which each period falls towards, as a share of where it began.

    Raises:
        ArgumentError: a number out of its range.

    Reference: Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, eq. 5, and §4.1
    for the period factor T_mult.

    >>> schedule = CosineRestarts(period_updates=2, period_factor=2, shrink=0.5, end_factor=0.0)
    >>> [round(schedule(update, None), 3) for update in range(1, 8)]
    [1.0, 0.5, 0.5, 0.427, 0.25, 0.073, 0.25]
    """

    period_updates: int
    period_factor: float = 1.0
    shrink: float = 1.0
    warmup_updates: int = 0
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_count("period_updates", self.period_updates, at_least=1)
        must = "between 1 and 1000, as periods must not get shorter and shorter"
        require_number("period_factor", self.period_factor, "[1, 1000]", must, "1 and 2 are usual")
        check_shrink(self.shrink)
        check_end_factor(self.end_factor)

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        number, done = self._period(update - max(self.warmup_updates, 1))
        return self.shrink**number * (self.end_factor + (1 - self.end_factor) * (1 + cos(pi * done)) / 2)

    def _period(self, since: int) -> tuple[int, float]:
        """In which period update `since` after the warm-up is, from 0, and how much of it is done."""
        if self.period_factor == 1:
            number, within = divmod(since, self.period_updates)
            return number, within / self.period_updates
        number, begin, length = 0, 0.0, float(self.period_updates)
        while since >= begin + length:  # whole numbers are exact here, and there are few: each is longer
            number, begin, length = number + 1, begin + length, length * self.period_factor
        return number, (since - begin) / length

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, updates)
