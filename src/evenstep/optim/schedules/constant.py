"""The base LR for the whole run, after a warm-up; for runs whose length is not known, too."""

from dataclasses import dataclass
from typing import final

from evenstep.optim.schedules.schedule import LrSchedule, check_count, check_warmup_fits, warmup_factor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(LrSchedule):
    """Warm-up, then 1.

        u / W        for u < W
        1            from then on

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.

    Raises:
        ArgumentError: a number out of its range.

    >>> [Constant(warmup_updates=2)(update, None) for update in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    warmup_updates: int = 0

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)

    def __call__(self, update: int, updates: int | None) -> float:
        return warmup_factor(update, self.warmup_updates)

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, updates)
