"""What schedules have in common that change at whole numbers of updates or of epochs.

In epochs, all updates of an epoch have the same multiplier, whatever their number. An epoch is that of the update's
batch, so a resumed run has the same. A warm-up is always in updates.
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from evenstep.arguments import require_word
from evenstep.optim.schedules.schedule import LrSchedule, Need, check_count, check_warmup_fits, warmup_factor

Unit = Literal["updates", "epochs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSchedule(LrSchedule):
    """Warm-up times a multiplier that depends on how many updates, or epochs, are done.

        min(u / W, 1) · f(n)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        unit: what n counts: updates, or epochs.

    Raises:
        ArgumentError: a number out of its range.
    """

    warmup_updates: int = 0
    unit: Unit = "updates"

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        require_word("unit", self.unit, get_args(Unit))

    @abstractmethod
    def after(self, done: int) -> float:
        """f(n): the multiplier when n updates or epochs are done."""

    def __call__(self, update: int, updates: int | None) -> float:
        return self.in_epoch(update, 0, updates)

    @property
    def needs(self) -> Collection[Need]:
        return ("epochs",) if self.unit == "epochs" else ()

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        done = epoch if self.unit == "epochs" else self._updates_done(update)
        return warmup_factor(update, self.warmup_updates) * self.after(done)

    def _updates_done(self, update: int) -> int:
        """n, where it counts updates: those since the warm-up, so that it rises to 1."""
        return max(update - max(self.warmup_updates, 1), 0)

    def check(self, updates: int | None) -> None:
        if updates is not None:
            check_warmup_fits(self.warmup_updates, updates)
