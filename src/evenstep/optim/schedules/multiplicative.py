"""A multiplier that is itself multiplied, after every epoch or update, by the next of some factors."""

from dataclasses import dataclass
from math import inf, prod
from typing import final

from evenstep.arguments import require_number, require_several
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import CountedSchedule, Unit, check_min_factor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicative(CountedSchedule):
    """Warm-up to 1, then multiplied after each epoch, or update, by the next of some factors; the last one goes on.

        min(u / W, 1) · max(γ_1 · γ_2 · … · γ_n, m)    n epochs, or updates since the warm-up, are done

    Args:
        factors: γ, one for each epoch (or update) that has ended; for those after the last, the last.
        min_factor: m, below which it does not fall.
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        unit: what is counted: epochs, or updates.

    Raises:
        ArgumentError: a number out of its range, or no factor.

    Reference: `torch.optim.lr_scheduler.MultiplicativeLR`, and with one factor `ExponentialLR`.

    >>> schedule = Multiplicative(factors=(1.0, 0.5))  # two epochs at the full LR, then half of it, a quarter, …
    >>> [schedule.in_epoch(1, epoch, None) for epoch in range(4)]
    [1.0, 1.0, 0.5, 0.25]
    """

    factors: tuple[float, ...]
    min_factor: float = 0.0
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        CountedSchedule.__post_init__(self)
        require_several("factors", self.factors, float | int, "`factors=(0.95,)`")
        object.__setattr__(self, "factors", tuple(self.factors))
        if not self.factors:
            raise ArgumentError("`factors` must hold at least one number, but is empty; write `factors=(0.95,)`.")
        for number, factor in enumerate(self.factors):
            require_number(f"factors[{number}]", factor)
            if not 0 < factor < inf:
                raise ArgumentError(
                    f"`factors` must be above 0 and finite, but number {number + 1} of them is {factor}; change it."
                )
        check_min_factor(self.min_factor)

    def after(self, done: int) -> float:
        more = max(done - len(self.factors), 0)
        return max(prod(self.factors[:done]) * self.factors[-1] ** more, self.min_factor)
