"""A multiplier that falls when an evaluation's metric no longer gets better: the one schedule with a memory."""

from collections.abc import Collection
from math import inf, isfinite
from typing import Any, Literal, final

from evenstep.optim.schedule import LrSchedule, Need, check_warmup, require, require_count, warmup_factor

_STATE = ("multiplier", "best_value", "evaluations_since_best", "cooldown_left")


@final
class Plateau(LrSchedule):
    """Warm-up to 1, then multiplied by a factor after every so many evaluations in a row without an improvement.

    A `Trainer` tells it of its evaluations and saves its memory. In a loop of one's own, call `evaluated`.

    Args:
        metric: an evaluation and its metric.
        mode: whether lower ("min") or higher ("max") is better.
        factor: what the multiplier is multiplied by.
        patience_evaluations: after how many evaluations in a row of which none was better than the best before;
            `torch.optim.lr_scheduler.ReduceLROnPlateau`, which counts from 0, has one less.
        min_delta: how much better a value must be, more than this, in units of the metric; or
        relative: with True, as a share of the best value.
        cooldown_evaluations: so many evaluations after each fall do not count.
        min_factor: the multiplier does not fall below this.
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none. Evaluations during it do not count.

    Attributes:
        multiplier: how far it has fallen.
        best_value: of the metric; None before there is a finite one.
        evaluations_since_best: how many evaluations have counted as no better since then, or since the last fall.
        cooldown_left: how many evaluations still do not count.

    Raises:
        ArgumentError: a number out of its range.

    Reference: `torch.optim.lr_scheduler.ReduceLROnPlateau`; of negative values a relative improvement is one of
    |best|, where that one takes worse values for better.

    >>> schedule = Plateau(factor=0.5, patience_evaluations=2)
    >>> for update, loss in enumerate((1.0, 0.9, 0.95, 0.93), start=1):
    ...     schedule.evaluated(loss, update=update)
    >>> schedule(5, None)
    0.5
    """

    def __init__(
        self,
        *,
        metric: str = "valid/loss",
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience_evaluations: int = 3,
        min_delta: float = 0.0,
        relative: bool = False,
        cooldown_evaluations: int = 0,
        min_factor: float = 0.0,
        warmup_updates: int = 0,
    ) -> None:
        require("metric", metric, "an evaluation and its metric, such as 'valid/loss'", fits="/" in metric)
        require("mode", mode, "'min' or 'max'", fits=mode in ("min", "max"))
        require("factor", factor, "above 0 and below 1", fits=0 < factor < 1)
        require_count("patience_evaluations", patience_evaluations, at_least=1)
        require("min_delta", min_delta, "a number of at least 0", fits=0 <= min_delta < inf)
        require_count("cooldown_evaluations", cooldown_evaluations)
        require("min_factor", min_factor, "at least 0 and below 1", fits=0 <= min_factor < 1)
        require_count("warmup_updates", warmup_updates)
        self.metric = metric
        self.factor = factor
        self.mode: Literal["min", "max"] = mode
        self.patience_evaluations = patience_evaluations
        self.cooldown_evaluations = cooldown_evaluations
        self.min_delta = min_delta
        self.relative = relative
        self.min_factor = min_factor
        self.warmup_updates = warmup_updates
        self.reset()

    def reset(self) -> None:
        """Forget all evaluations."""
        self.multiplier = 1.0
        self.best_value: float | None = None
        self.evaluations_since_best = 0
        self.cooldown_left = 0

    @property
    def needs(self) -> Collection[Need]:
        return ("evaluations",)

    def __call__(self, update: int, updates: int | None) -> float:
        return warmup_factor(update, self.warmup_updates) * self.multiplier

    def check(self, updates: int | None) -> None:
        check_warmup(self.warmup_updates, updates)

    def evaluated(self, value: float, *, update: int) -> None:
        """Take note of an evaluation.

        Args:
            value: of the metric; one that is not finite is no improvement.
            update: the last one before the evaluation.
        """
        if update < self.warmup_updates:
            return
        if self._is_better(value):
            self.best_value = value
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        if self.cooldown_left:
            self.cooldown_left -= 1
            self.evaluations_since_best = 0
        if self.evaluations_since_best >= self.patience_evaluations:
            self.multiplier = max(self.multiplier * self.factor, self.min_factor)
            self.cooldown_left = self.cooldown_evaluations
            self.evaluations_since_best = 0

    def _is_better(self, value: float) -> bool:
        if not isfinite(value):
            return False
        if self.best_value is None:
            return True
        gain = self.best_value - value if self.mode == "min" else value - self.best_value
        return gain > self.min_delta * (abs(self.best_value) if self.relative else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The memory, and the metric that its values are of."""
        return {"metric": self.metric, "mode": self.mode, **{name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Take back what `state_dict` gave; gives half a sentence if its values are of another metric, else ""."""
        self.reset()
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return (
                f"the LR schedule follows `{self.metric}` ({self.mode}) instead of `{state['metric']}` "
                f"({state['mode']}), and begins at the full rate"
            )
        for name in _STATE:
            setattr(self, name, state[name])
        return ""
