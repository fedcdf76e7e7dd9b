"""A warm-up, a long stable stretch, and an exponential decay to the end of the run or sooner."""

from dataclasses import dataclass
from typing import final

from evenstep.arguments import require_number
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import (
    LrSchedule,
    check_count,
    check_end_factor,
    check_warmup_fits,
    decay_progress,
    known_updates,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TriStage(LrSchedule):
    """From a share of the base LR up to it, stable there, then exponentially down to another share, where it stays.

        i + (1 - i) · u / W    for u < W
        1                      for the H updates after that (and for u = W)
        e^p                    from then on, p = (u - s - H) / D up to 1, s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        hold_updates: H, updates at the full LR after the warm-up.
        decay_updates: D, updates of the decay; None for all that are left of the run.
        start_factor: i, which the warm-up rises from.
        end_factor: e, the multiplier after the decay; above 0, which an exponential never reaches.

    Raises:
        ArgumentError: a number out of its range.

    Reference: Park et al., "SpecAugment: a simple data augmentation method for automatic speech recognition",
    Interspeech 2019, §3.2 (ramp up, hold, exponential decay; there with i = 0 and e = 0.01).

    >>> schedule = TriStage(warmup_updates=2, hold_updates=1, decay_updates=2, end_factor=0.25)
    >>> [schedule(update, None) for update in range(1, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25]
    """

    warmup_updates: int = 0
    hold_updates: int = 0
    decay_updates: int | None = None
    start_factor: float = 0.0
    end_factor: float = 0.01

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_count("hold_updates", self.hold_updates)
        if self.decay_updates is not None:
            check_count("decay_updates", self.decay_updates, at_least=1)
        require_number("start_factor", self.start_factor, "[0, 1]", "between 0 and 1, as a share of the base LR")
        check_end_factor(self.end_factor)
        if self.end_factor == 0:
            raise ArgumentError(
                "`end_factor` must be above 0 for TriStage, whose decay is exponential, but is 0; 0.01 is usual."
            )

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return self.start_factor + (1 - self.start_factor) * update / self.warmup_updates
        begin = self._decay_begins
        if update <= begin:
            return 1.0
        end = known_updates(updates, self) if self.decay_updates is None else begin + self.decay_updates
        return self.end_factor ** decay_progress(update, begin, end)

    @property
    def _decay_begins(self) -> int:
        """The last update at the full LR."""
        return max(self.warmup_updates, 1) + self.hold_updates

    def check(self, updates: int | None) -> None:
        if updates is None and self.decay_updates is not None:
            return
        total = known_updates(updates, self)
        check_warmup_fits(self.warmup_updates, total)
        decay = self.decay_updates or 0
        if (self.hold_updates or decay) and self._decay_begins + decay > total:
            raise ArgumentError(
                f"`warmup_updates`, `hold_updates` and `decay_updates` must together be at most the {total} updates of "
                f"the run, but are {self.warmup_updates}, {self.hold_updates} and {decay}; lower them or train longer."
            )
