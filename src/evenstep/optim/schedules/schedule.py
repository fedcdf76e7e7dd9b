"""A learning-rate schedule as a pure function from the number of an update to a multiplier.

The multiplier is for each parameter group's own base LR. Updates are numbered from 1, as they are when they commit,
so an update that was aborted and tried again has the same LR, and nothing is saved or replayed on resume. What sets
the LR in an optimizer is not here.
"""

from abc import ABC, abstractmethod

from evenstep.errors import ArgumentError


class LrSchedule(ABC):
    """A multiplier of the base LR for every update."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, update: int, updates: int | None) -> float:
        """The multiplier, in [0, 1] and above 0 at the first update.

        Args:
            update: the update's number, from 1.
            updates: how many updates the run is to have; None if that is not known.
        """

    @abstractmethod
    def check(self, updates: int | None) -> None:
        """Raise ArgumentError unless a run of so many updates can follow this schedule."""


def warmup_factor(update: int, warmup_updates: int) -> float:
    """k / W for update k of a warm-up of W updates, then 1.

    >>> [warmup_factor(update, 4) for update in range(1, 6)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return update / warmup_updates if update < warmup_updates else 1.0


def decay_progress(update: int, begin_update: int, end_update: int) -> float:
    """How much of a decay is done: 0 up to update `begin_update`, 1 from `end_update` on, a straight line between.

    >>> [decay_progress(update, 2, 4) for update in range(1, 6)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if update <= begin_update:
        return 0.0
    if update >= end_update:
        return 1.0
    return (update - begin_update) / (end_update - begin_update)


def known_updates(updates: int | None, schedule: LrSchedule) -> int:
    """`updates`, for a schedule that ends with the run.

    Raises:
        ArgumentError: it is None.
    """
    if updates is None:
        raise ArgumentError(
            f"`updates` must be known for the LR schedule {type(schedule).__name__}, which ends with the run, but is "
            f"None; set it, or take a schedule without an end (Constant, InverseSqrt)."
        )
    return updates


def check_warmup_fits(warmup_updates: int, updates: int) -> None:
    """Raise ArgumentError if the warm-up is longer than the run."""
    if warmup_updates > updates:
        raise ArgumentError(
            f"`warmup_updates` must be at most the {updates} updates of the run, but is {warmup_updates}; lower it or "
            f"train longer."
        )


def check_count(name: str, value: int) -> None:
    """Raise ArgumentError unless `value` is a whole number, at least 0."""
    if type(value) is not int or value < 0:
        raise ArgumentError(f"`{name}` must be a whole number of updates, at least 0, but is {value!r}; set it so.")


def check_end_factor(value: float) -> None:
    """Raise ArgumentError unless `value` is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ArgumentError(
            f"`end_factor` must be between 0 and 1, as a share of the base LR, but is {value}; set it so."
        )
