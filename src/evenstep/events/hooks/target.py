"""What it means for an evaluation to be better than another: a metric, a direction, a least difference.

It is used by every hook that follows the best evaluation. It remembers nothing.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from evenstep.arguments import advice
from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import EvaluateEnd
from evenstep.events.hook import Hook

Mode = Literal["min", "max"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTarget:
    """Follow `metric`, where lower ("min") or higher ("max") is better, by more than `min_delta`.

    Raises:
        ArgumentError: for an argument that cannot be.

    >>> target = MetricTarget(metric="valid/loss", mode="min", min_delta=0.0)
    >>> target.better(1.0, than=2.0), target.better(2.0, than=2.0), target.better(float("nan"), than=None)
    (True, False, False)
    """

    metric: str
    mode: Mode
    min_delta: float

    def __post_init__(self) -> None:
        if "/" not in self.metric:
            raise ArgumentError(
                f"`metric` must be an evaluation and its metric, such as `valid/loss`, but is `{self.metric}`.",
                field="metric",
            )
        if self.mode not in get_args(Mode):
            raise ArgumentError(f"`mode` must be `min` or `max`, but is `{self.mode}`.", field="mode")

    @property
    def evaluation(self) -> str:
        """The evaluation that the metric belongs to."""
        return self.metric.partition("/")[0]

    def is_of_training(self, hook: Hook) -> bool:
        return self.evaluation == "train" and "train" not in hook.trainer.evaluations

    def check(self, hook: Hook, *, asked: bool = True) -> None:
        """Check that the trainer of `hook` has the evaluation that this is about.

        Args:
            asked: whether evaluations are asked for during the run, where that matters.

        Raises:
            HookError: it has not, or nobody asks for it, so `hook` would wait in vain.
        """
        try:
            self.check_evaluation(list(hook.trainer.evaluations), asked=asked)
        except ArgumentError as error:
            raise HookError(f"hook `{hook.name}`: {error}") from None

    def check_evaluation(self, evaluations: Sequence[str], *, asked: bool) -> None:
        if self.evaluation not in evaluations:
            raise ArgumentError(
                f"`metric` is `{self.metric}`, but there is no evaluation `{self.evaluation}`; "
                f"{advice(self.evaluation, evaluations)}",
                field="metric",
            )
        if not asked:
            raise ArgumentError(
                f"`metric` is `{self.metric}`, but nothing asks for evaluations before the run's end; "
                f"ask for them by `Evaluate(every_updates=…)`.",
                field="metric",
            )

    def check_training(self, hook: Hook) -> None:
        place = self.metric.rpartition("/")[0]
        beside = [name for name in hook.trainer.storage.names() if name.rpartition("/")[0] == place]
        if beside:
            self._check_known(hook, beside)

    def value(self, hook: Hook, event: EvaluateEnd) -> float | None:
        """Metric in `event`; None for an event of another evaluation, or of one that failed.

        Raises:
            HookError: the evaluation has no such metric.
        """
        if event.name != self.evaluation or not event.metrics:
            return None
        self._check_known(hook, event.metrics)
        return event.metrics[self.metric]

    def _check_known(self, hook: Hook, known: Collection[str]) -> None:
        if self.metric not in known:
            raise HookError(
                f"hook `{hook.name}` follows `{self.metric}`, but there is no such metric; "
                f"{advice(self.metric, known)}",
                field="metric",
            )

    def state_dict(self) -> dict[str, str]:
        return {"metric": self.metric, "mode": self.mode}

    def differs(self, state: Mapping[str, Any]) -> str:
        metric, mode = state["metric"], state["mode"]
        if (metric, mode) == (self.metric, self.mode):
            return ""
        return f"follows `{self.metric}` ({self.mode}) instead of `{metric}` ({mode}), and begins afresh"

    def better(self, value: float, than: float | None) -> bool:
        if not math.isfinite(value):
            return False
        gain = math.inf if than is None else than - value if self.mode == "min" else value - than
        return gain > self.min_delta

    def beats(self, value: float, other: float | None) -> bool:
        if not math.isfinite(value):
            return False
        return other is None or (value < other if self.mode == "min" else value > other)
