"""The seam of learning-rate schedules: a pure function from the number of an update to a multiplier.

The multiplier is for each parameter group's own base LR. Updates are numbered from 1, as they are when they commit, so
an update that was aborted and retried has the same LR, and nothing is saved or replayed on resume.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal

from evenstep.errors import ArgumentError

Need = Literal["epochs", "evaluations", "groups"]


class LrSchedule(ABC):
    """A multiplier of the base LR for every update."""

    __slots__ = ()

    @property
    def needs(self) -> Collection[Need]:
        """What the multiplier depends on beside the update's number and the length of the run."""
        return ()

    @abstractmethod
    def __call__(self, update: int, updates: int | None) -> float:
        """The multiplier: finite, at least 0, and above 0 at the first update; mostly at most 1.

        Args:
            update: the update's number, from 1.
            updates: the length of the run; None if that is not known.
        """

    @abstractmethod
    def check(self, updates: int | None) -> None:
        """Raise ArgumentError unless a run of so many updates can follow this schedule."""

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        """The multiplier of an update whose batch is of `epoch`, which counts from 0 as in events."""
        return self(update, updates)

    def of_group(self, name: str) -> "LrSchedule":
        """The schedule of the optimizer's group of this name, or of this number where it has none."""
        return self


def warmup_factor(update: int, warmup_updates: int) -> float:
    """k / W for update k of a warm-up of W updates, then 1.

    >>> [warmup_factor(update, 4) for update in range(1, 6)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return update / warmup_updates if update < warmup_updates else 1.0


def check_warmup(warmup_updates: int, updates: int | None) -> None:
    """Raise ArgumentError if the warm-up is longer than the run, where its length is known."""
    if updates is not None and warmup_updates > updates:
        raise ArgumentError(
            f"`warmup_updates` must be at most the {updates} updates of the run, but is {warmup_updates}; lower it or "
            f"train longer.",
            field="warmup_updates",
        )


def require(name: str, value: object, must: str, *, fits: bool) -> None:
    """Raise ArgumentError unless a schedule's argument fits.

    >>> require("factor", 2.0, "above 0 and below 1", fits=False)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `factor` must be above 0 and below 1, but is 2.0; change it.
    """
    if not fits:
        raise ArgumentError(f"`{name}` must be {must}, but is {value!r}; change it.", field=name)


def require_count(name: str, value: int, *, at_least: int = 0) -> None:
    """Raise ArgumentError unless an argument is a whole number, and not too small."""
    require(name, value, f"a whole number, at least {at_least}", fits=type(value) is int and value >= at_least)


def require_share(name: str, value: float) -> None:
    """Raise ArgumentError unless an argument is a share of the base LR."""
    require(name, value, "between 0 and 1, as a share of the base LR", fits=0 <= value <= 1)
