"""Stop when evaluations no longer get better.

The best value and the evaluations since then are part of the checkpoint. Who lets a run go on that it has stopped
wants it to, so it then waits for as many evaluations again. It saves nothing; `Best` does.
"""

from typing import Any, final

from evenstep.events.event import EvaluateEnd, TrainBegin
from evenstep.events.hook import Hook
from evenstep.events.hooks.target import MetricTarget, Mode


@final
class EarlyStop(Hook):
    """Asks to stop after `patience_evaluations` evaluations in a row without a new best value.

    Evaluations after the same update count once, whoever has asked for them.

    Args:
        metric: an evaluation and its metric.
        mode: whether lower ("min") or higher ("max") is better.
        patience_evaluations: how many evaluations to wait for a better one.
        min_delta: how much better it must be, more than this, in units of the metric.

    Attributes:
        follows: the metric, of which a trainer sees to it that it is evaluated during the run.

    >>> hook = EarlyStop(metric="valid/loss", patience_evaluations=3)
    """

    def __init__(
        self,
        metric: str = "valid/loss",
        mode: Mode = "min",
        *,
        patience_evaluations: int,
        min_delta: float = 0.0,
    ) -> None:
        self.follows = MetricTarget(metric=metric, mode=mode, min_delta=min_delta)
        self._patience = patience_evaluations
        self.best_value: float | None = None
        self.evaluations_since_best = 0
        self._counted_at = -1

    def before_train(self, event: TrainBegin) -> None:
        if self.evaluations_since_best >= self._patience:
            self.evaluations_since_best = 0

    def after_evaluate(self, event: EvaluateEnd) -> None:
        value = self.follows.value(self, event)
        if value is None or event.update == self._counted_at:
            return
        self._counted_at = event.update
        if self.follows.better(value, than=self.best_value):
            self.best_value, self.evaluations_since_best = value, 0
            return
        self.evaluations_since_best += 1
        if self.evaluations_since_best >= self._patience:
            best = "no finite value yet" if self.best_value is None else f"the best is {self.best_value:.6g}"
            self.trainer.request_stop(
                f"`{self.follows.metric}` did not get better in {self.evaluations_since_best} evaluations ({best})"
            )

    def state_dict(self) -> dict[str, Any]:
        since = self.evaluations_since_best
        own = {"best_value": self.best_value, "evaluations_since_best": since, "counted_at": self._counted_at}
        return {**self.follows.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        self.best_value, self.evaluations_since_best, self._counted_at = None, 0, -1
        if said := self.follows.differs(state):
            return said
        self.best_value, self._counted_at = state["best_value"], state["counted_at"]
        self.evaluations_since_best = since = state["evaluations_since_best"]
        return (
            None
            if since < self._patience
            else f"had stopped the run after {since} evaluations that were no better, and counts from 0 again"
        )
