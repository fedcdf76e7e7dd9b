"""LR schedule that falls when a metric of evaluations stops improving."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from math import isfinite
from typing import Annotated, Any, Literal

from annotated_types import Interval

from evenstep.optim.lr_schedule import Need, Warmup, warmup_factor
from evenstep.schema import Count, Natural, NonNegative, Share, option


@dataclass
class PlateauState:
    """Memory of a `Plateau`."""

    multiplier: float = 1.0
    """Product of all falls."""
    best_value: float | None = None
    """Best finite value of the metric; None at first."""
    evaluations_since_best: int = 0
    """Evaluations without an improvement since the best one, or since the last fall."""
    cooldown_left: int = 0
    """Number of following evaluations that do not count."""


@option
class Plateau(Warmup):
    """Warm-up to 1, then multiplied by a factor after every so many evaluations in a row without an improvement.

    A `Trainer` calls `evaluated` after each evaluation and saves the state. Other loops call it themselves.
    Evaluations during the warm-up do not count.

    Reference: `torch.optim.lr_scheduler.ReduceLROnPlateau`, except that relative improvements of a negative best value
    are fractions of |best|, and that its patience is smaller by 1.

    >>> schedule = Plateau(factor=0.5, patience_evaluations=2)
    >>> for update, loss in enumerate((1.0, 0.9, 0.95, 0.93), start=1):
    ...     schedule.evaluated(loss, update=update)
    >>> schedule(5, None)
    0.5
    """

    _: KW_ONLY
    metric: str = "valid/loss"
    """Metric of an evaluation, such as `valid/loss`."""
    mode: Literal["min", "max"] = "min"
    """`min` if smaller is better, `max` if larger is better."""
    factor: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Multiplies the learning rate at each fall."""
    patience_evaluations: Count = 3
    """Evaluations in a row without an improvement before a fall."""
    min_delta: NonNegative = 0.0
    """Largest change that does not count as an improvement."""
    relative: bool = False
    """Take `min_delta` as a share of the best value instead of a number in the metric's own unit."""
    cooldown_evaluations: Natural = 0
    """Evaluations after each fall that do not count."""
    min_factor: Share = 0.0
    """Lower limit of the multiplier."""

    @cached_property
    def state(self) -> PlateauState:
        return PlateauState()

    @property
    def needs(self) -> tuple[Need]:
        return ("evaluations",)

    def __call__(self, update: int, updates: int | None) -> float:
        return warmup_factor(update, self.warmup_updates) * self.state.multiplier

    def evaluated(self, value: float, *, update: int) -> None:
        """Count an evaluation's value of the metric, made after `update`; inf and NaN are no improvement."""
        state = self.state
        if update < self.warmup_updates:
            return
        if self._is_better(value):
            state.best_value = value
            state.evaluations_since_best = 0
        else:
            state.evaluations_since_best += 1
        if state.cooldown_left:
            state.cooldown_left -= 1
            state.evaluations_since_best = 0
        if state.evaluations_since_best >= self.patience_evaluations:
            state.multiplier = max(state.multiplier * self.factor, self.min_factor)
            state.cooldown_left = self.cooldown_evaluations
            state.evaluations_since_best = 0

    def _is_better(self, value: float) -> bool:
        best = self.state.best_value
        if best is None or not isfinite(value):
            return isfinite(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta * (abs(best) if self.relative else 1.0)

    def reset(self) -> None:
        """Forget all evaluations."""
        vars(self)["state"] = PlateauState()

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, **asdict(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Load a state; gives half a sentence if it is of another metric and is not used, else ""."""
        self.reset()
        values = dict(state)
        followed = (values.pop("metric"), values.pop("mode"))
        if followed != (self.metric, self.mode):
            return (
                f"the LR schedule follows `{self.metric}` ({self.mode}) instead of `{followed[0]}` ({followed[1]}), "
                f"and begins at the full rate"
            )
        vars(self)["state"] = PlateauState(**values)
        return ""
