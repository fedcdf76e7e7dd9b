"""A warm-up, then a power of what is left of the run."""

from dataclasses import dataclass
from math import inf
from typing import final

from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import (
    LrSchedule,
    check_count,
    check_end_factor,
    check_warmup_fits,
    decay_progress,
    known_updates,
    warmup_factor,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(LrSchedule):
    """Warm-up to 1, then polynomial decay, which reaches its end at the last update.

        u / W                        for u < W
        e + (1 - e) · (1 - p)ⁿ       from then on, p = (u - s) / (U - s), s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        power: n, above 0; 1 is a straight line, more falls sooner.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range.

    >>> [Polynomial(power=2.0, end_factor=0.0)(update, 3) for update in (1, 2, 3)]
    [1.0, 0.25, 0.0]
    """

    warmup_updates: int = 0
    power: float = 1.0
    end_factor: float = 0.1

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_end_factor(self.end_factor)
        if not 0 < self.power < inf:
            raise ArgumentError(f"`power` must be above 0 and finite, but is {self.power}; 1 to 3 is usual.")

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        progress = decay_progress(update, max(self.warmup_updates, 1), known_updates(updates, self))
        return self.end_factor + (1 - self.end_factor) * (1 - progress) ** self.power

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, known_updates(updates, self))
