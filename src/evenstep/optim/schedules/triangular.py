"""A straight line up and one down again, over and over."""

from dataclasses import dataclass
from typing import final

from evenstep.arguments import require_number
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import LrSchedule, check_count, check_shrink


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Triangular(LrSchedule):
    """Cycles from a share of the base LR up to it and down again; it begins at the bottom, which is its warm-up.

        l + (1 - l) · kᶜ · (1 - |2 p - 1|)    c = ⌊u / P⌋, p = u / P - c

    Args:
        period_updates: P, updates of a cycle; the full LR is in its middle.
        low_factor: l, the multiplier between cycles.
        shrink: k, what the height of each cycle is multiplied by, compared with the one before it.

    Raises:
        ArgumentError: a number out of its range.

    Reference: Smith, "Cyclical learning rates for training neural networks", WACV 2017, §3.2: `triangular` with k = 1,
    `triangular2` with k = 1/2; P is two of its step sizes.

    >>> schedule = Triangular(period_updates=4, low_factor=0.5, shrink=0.5)
    >>> [schedule(update, None) for update in range(1, 9)]
    [0.75, 1.0, 0.75, 0.5, 0.625, 0.75, 0.625, 0.5]
    """

    period_updates: int
    low_factor: float = 0.1
    shrink: float = 1.0

    def __post_init__(self) -> None:
        check_count("period_updates", self.period_updates, at_least=2)
        must = "between 0 and 1, both excluded, as a share of the base LR"
        require_number("low_factor", self.low_factor, "(0, 1)", must)
        check_shrink(self.shrink)

    def __call__(self, update: int, updates: int | None) -> float:
        cycle, within = divmod(update, self.period_updates)
        height = 1 - abs(2 * within / self.period_updates - 1)
        return self.low_factor + (1 - self.low_factor) * self.shrink**cycle * height

    def check(self, updates: int | None) -> None:
        if updates is not None and self.period_updates > 2 * updates:
            raise ArgumentError(
                f"`period_updates` must be at most twice the {updates} updates of the run, so that the full LR is "
                f"reached, but is {self.period_updates}; lower it or train longer."
            )
