"""Base classes of learning-rate schedules.

u is the update's number from 1, U the length of the run, W = `warmup_updates`, s = max(W, 1).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import KW_ONLY
from typing import Literal

from evenstep.errors import ArgumentError
from evenstep.schema import Natural, option

Need = Literal["epochs", "evaluations", "groups"]


class LrSchedule(ABC):
    """Multiplier of the base learning rate for every update."""

    @property
    def needs(self) -> Collection[Need]:
        """Inputs of the multiplier beside the update's number and the length of the run."""
        return ()

    @abstractmethod
    def __call__(self, update: int, updates: int | None) -> float:
        """Multiplier of an update: finite, at least 0, and above 0 at the first update.

        Args:
            update: number of the update, from 1.
            updates: length of the run; None if unknown.
        """

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError if a run of this length can't follow the schedule."""

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        """Multiplier of an update whose batch is of `epoch`, which counts from 0."""
        return self(update, updates)

    def of_group(self, name: str) -> "LrSchedule":
        """Schedule of the optimizer's group of this name; a group without a name has its number."""
        return self


def warmup_factor(update: int, warmup_updates: int) -> float:
    """u / W for update u of a warm-up of W updates, then 1.

    >>> [warmup_factor(update, 4) for update in range(1, 6)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return update / warmup_updates if update < warmup_updates else 1.0


def check_room(updates_needed: int, updates: int | None, field: str) -> None:
    """Raise ArgumentError if a run of known length is too short for a schedule."""
    if updates is not None and updates_needed > updates:
        raise ArgumentError(
            f"the LR schedule needs {updates_needed} updates, but the run has {updates}; lower `{field}` or train "
            f"longer.",
            field=field,
        )


@option
class Warmup(LrSchedule):
    """Base of schedules with a linear warm-up."""

    _: KW_ONLY
    warmup_updates: Natural = 0
    """Length of the linear warm-up to the full learning rate, in updates; 0 and 1 both mean none."""

    def check(self, updates: int | None) -> None:
        check_room(self.warmup_updates, updates, "warmup_updates")


class Curve(Warmup):
    """Base of schedules that are u / W for u < W, and another function of u from then on."""

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        return self.after_warmup(update, updates)

    @abstractmethod
    def after_warmup(self, update: int, updates: int | None) -> float:
        """Multiplier of an update from W on."""
