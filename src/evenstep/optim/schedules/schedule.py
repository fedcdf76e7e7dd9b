"""A learning-rate schedule as a pure function from the number of an update to a multiplier.

The multiplier is for each parameter group's own base LR. Updates are numbered from 1, as they are when they commit,
so an update that was aborted and tried again has the same LR, and nothing is saved or replayed on resume. A schedule
that depends on more (the epoch, an evaluation, the group) says so. What sets the LR in an optimizer is not here.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from evenstep.arguments import require_number, require_word
from evenstep.errors import ArgumentError

Need = Literal["epochs", "evaluations", "groups"]
Unit = Literal["updates", "epochs"]


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
            updates: how many updates the run is to have; None if that is not known.
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


def check_warmup_fits(warmup_updates: int, updates: int | None) -> None:
    """Raise ArgumentError if the warm-up is longer than the run, where its length is known."""
    if updates is not None and warmup_updates > updates:
        raise ArgumentError(
            f"`warmup_updates` must be at most the {updates} updates of the run, but is {warmup_updates}; lower it or "
            f"train longer."
        )


def check_count(name: str, value: int, *, at_least: int = 0, of: str = "updates") -> None:
    """Raise ArgumentError unless `value` is a whole number of such things, and not too small."""
    if type(value) is not int or value < at_least:
        raise ArgumentError(
            f"`{name}` must be a whole number of {of}, at least {at_least}, but is {value!r}; set it so."
        )


def check_end_factor(value: float) -> None:
    """Raise ArgumentError unless `value` is in [0, 1]."""
    require_number("end_factor", value, "[0, 1]", "between 0 and 1, as a share of the base LR")


def check_shrink(value: float, name: str = "shrink") -> None:
    """Raise ArgumentError unless `value` is above 0 and at most 1."""
    require_number(name, value, "(0, 1]", "above 0 and at most 1")


def check_min_factor(value: float) -> None:
    """Raise ArgumentError unless `value` is in [0, 1)."""
    require_number("min_factor", value, "[0, 1)", "at least 0 and below 1, as a share of the base LR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay(LrSchedule):
    """Warm-up to 1, then a fall that reaches its end at the last update U.

        u / W                      for u < W
        e + (1 - e) · r(p)         from then on, p = (u - s) / (U - s), s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range.
    """

    warmup_updates: int = 0
    end_factor: float = 0.1

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_end_factor(self.end_factor)

    @abstractmethod
    def _remaining(self, progress: float) -> float:
        """r(p): 1 at the beginning of the fall (p = 0), 0 at its end (p = 1)."""

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        progress = decay_progress(update, max(self.warmup_updates, 1), known_updates(updates, self))
        return self.end_factor + (1 - self.end_factor) * self._remaining(progress)

    def check(self, updates: int | None) -> None:
        check_warmup_fits(self.warmup_updates, known_updates(updates, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSchedule(LrSchedule):
    """Warm-up times a multiplier that depends on how many updates, or epochs, are done.

        min(u / W, 1) · f(n)

    In epochs, all updates of an epoch have the same multiplier, whatever their number. An epoch is that of the update's
    batch, so a resumed run has the same. A warm-up is always in updates.

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
        check_warmup_fits(self.warmup_updates, updates)
