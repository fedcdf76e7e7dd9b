"""A metric to follow: its name, its direction, and the least improvement that counts."""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, final

from evenstep.arguments import advice
from evenstep.errors import HookError
from evenstep.events.event import EvaluateEvent
from evenstep.events.hook import Hook
from evenstep.schema import Matching, option

Mode = Literal["min", "max"]


@final
@option
class MetricTarget:
    """A metric to follow."""

    metric: Annotated[str, Matching(".+/.+", "a name such as valid/loss")]
    """Evaluation and metric, such as "valid/loss"."""
    mode: Mode
    """"min" if lower is better, "max" if higher is better."""
    min_delta: float
    """Least improvement, in units of the metric; a gain must be larger."""

    @property
    def evaluation(self) -> str:
        return self.metric.partition("/")[0]

    def check(self, hook: Hook) -> None:
        """Raise HookError if the trainer of `hook` lacks the evaluation."""
        self._check_known(hook, self.evaluation, hook.trainer.evaluations)

    def value(self, hook: Hook, event: EvaluateEvent) -> float | None:
        """Value of the metric in `event`; None for another evaluation, or a failed one."""
        if event.name != self.evaluation or not event.metrics:
            return None
        self._check_known(hook, self.metric, event.metrics)
        return event.metrics[self.metric]

    def _check_known(self, hook: Hook, name: str, known: Collection[str]) -> None:
        if name not in known:
            raise HookError(
                f"hook `{hook.name}` follows `{self.metric}`, but there is no `{name}`; {advice(name, known)}",
                field="metric",
            )

    def state_dict(self) -> dict[str, str]:
        return {"metric": self.metric, "mode": self.mode}

    def differs(self, state: Mapping[str, Any]) -> str:
        """Difference from the target of a saved hook, in half a sentence; "" for none."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            return ""
        return (
            f"follows `{self.metric}` ({self.mode}) instead of `{state['metric']}` ({state['mode']}), and starts over"
        )

    def better(self, value: float, than: float | None) -> bool:
        """True if `value` is finite and improves on `than` by more than `min_delta`."""
        return math.isfinite(value) and (than is None or self.gain(value, than) > self.min_delta)

    def gain(self, value: float, other: float) -> float:
        """Improvement of `value` on `other`, negative if it is worse."""
        return other - value if self.mode == "min" else value - other
