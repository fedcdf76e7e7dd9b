"""A warm-up, then a straight line down to the end of the run."""

from dataclasses import dataclass
from typing import final

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
class Linear(LrSchedule):
    """Warm-up to 1, then linear decay, which reaches its end at the last update.

        u / W                      for u < W
        e + (1 - e) · (1 - p)      from then on, p = (u - s) / (U - s), s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range.

    >>> [Linear(warmup_updates=2, end_factor=0.0)(update, 4) for update in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    warmup_updates: int = 0
    end_factor: float = 0.1

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_end_factor(self.end_factor)

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        progress = decay_progress(update, max(self.warmup_updates, 1), known_updates(updates, self))
        return self.end_factor + (1 - self.end_factor) * (1 - progress)

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, known_updates(updates, self))
