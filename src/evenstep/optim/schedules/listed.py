"""Multipliers written down one by one, each with the update or epoch that it begins at."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self, cast, final

from evenstep.arguments import require_number, require_several, said
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import CountedSchedule, Unit


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(CountedSchedule):
    """Warm-up times the last multiplier that has begun.

        min(u / W, 1) · f_i    for the last i whose begin n_i is at most the update's number, or its epoch's

    Args:
        factors: pairs (n_i, f_i) in the order of n_i; updates and epochs are numbered from 1, and the first n_i is 1.
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        unit: what n_i counts: updates, or epochs.

    Raises:
        ArgumentError: pairs that are none, out of order, or that begin later than at 1; a factor that is not above 0.

    Reference: `torch.optim.lr_scheduler.MultiStepLR` is the case of powers of one factor.

    >>> schedule = Listed(factors=((1, 1.0), (3, 0.1)))
    >>> [schedule(update, None) for update in range(1, 5)]
    [1.0, 1.0, 0.1, 0.1]
    """

    factors: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        CountedSchedule.__post_init__(self)
        require_several("factors", self.factors, tuple | list, "`factors=((1, 1.0), (1000, 0.1))`")
        pairs = tuple(tuple(pair) for pair in self.factors)
        object.__setattr__(self, "factors", pairs)
        if not pairs:
            raise ArgumentError("`factors` must hold at least one pair, but is empty; write `factors=((1, 1.0),)`.")
        before = 0
        for pair in pairs:
            before = _begin_of(pair, before, self.unit)

    @classmethod
    def of_rates(
        cls, rates: Sequence[tuple[int, float]], *, lr: float, unit: Unit = "updates", warmup_updates: int = 0
    ) -> Self:
        """The same from learning rates instead of multipliers.

        Args:
            rates: pairs (begin, learning rate).
            lr: what the optimizer was built with, which multipliers are of. Groups with another keep their proportion.

        >>> Listed.of_rates([(1, 0.2), (10, 0.1)], lr=0.2).factors
        ((1, 1.0), (10, 0.5))
        """
        require_several("rates", rates, tuple | list, "`rates=((1, 1e-3), (1000, 1e-4))`")
        require_number("lr", lr, "(0, inf)", "above 0 and finite", "give the optimizer's own")
        before = 0
        for pair in rates:
            before = _begin_of(tuple(pair), before, unit, "rates")
        pairs = tuple((begin, rate / lr) for begin, rate in rates)
        return cls(factors=pairs, unit=unit, warmup_updates=warmup_updates)

    def check(self, updates: int | None) -> None:
        CountedSchedule.check(self, updates)
        last = self.factors[-1][0]
        if updates is not None and self.unit == "updates" and last > updates:
            raise ArgumentError(
                f"`factors` must begin within the {updates} updates of the run, but one begins at {last}, which would "
                f"have no effect; leave it out or train longer."
            )

    def after(self, done: int) -> float:
        return self.factors[bisect_right([begin for begin, _ in self.factors], done + 1) - 1][1]

    def _updates_done(self, update: int) -> int:
        return update - 1  # they are numbered by the run, warm-up included


def _begin_of(pair: tuple[Any, ...], before: int, unit: Unit, name: str = "factors") -> int:
    """Where a pair begins.

    Raises:
        ArgumentError: it is no pair of a number of an update (or epoch) after `before` and a factor above 0.
    """
    if len(pair) != 2 or type(pair[0]) is not int:
        raise ArgumentError(
            f"`{name}` must hold pairs of a number of {unit} and a factor, but one is {said(cast('object', pair))} "
            f"{pair!r}; write `{name}=((1, 1.0), (1000, 0.1))`."
        )
    begin, value = pair
    if not (begin > before if before else begin == 1):
        must = f"come after {before}" if before else "begin with 1, the first"
        raise ArgumentError(
            f"`{name}` must be in the order of their {unit} and {must}, but one begins at {begin}; change it."
        )
    require_number(name, value)
    if not 0 < value < inf:
        raise ArgumentError(f"`{name}` must be above 0 and finite, but is {value} from {begin} on; change it.")
    return begin
