"""What it means for an evaluation to be better than another: a metric, a direction, a least difference.

It is used by every hook that follows the best evaluation. It remembers nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast, final, get_args

from evenstep.arguments import advice, require_number, require_word
from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import EvaluateEnd
from evenstep.events.hook import Hook

Mode = Literal["min", "max"]
_KEYS = {"Best": "checkpoint.best.metric", "EarlyStop": "early_stop.metric", "Plateau": "lr_schedule.metric"}


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
        if not isinstance(cast("object", self.metric), str) or "/" not in self.metric:
            raise ArgumentError(
                f"`metric` must be an evaluation and its metric, such as `valid/loss`, but is `{self.metric}`; "
                f"put the evaluation's name before it."
            )
        require_word("mode", self.mode, get_args(Mode))
        require_number("min_delta", self.min_delta, "[0, inf)", "a number of at least 0", "raise it")

    @property
    def evaluation(self) -> str:
        """The evaluation that the metric belongs to."""
        return self.metric.partition("/")[0]

    def is_of_training(self, hook: Hook) -> bool:
        """Whether the metric is one of training, of which the trainer of `hook` has no evaluation."""
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
        """Raise ArgumentError unless this is about one of the evaluations of these names, which are asked for."""
        if self.evaluation not in evaluations:
            close = get_close_matches(self.evaluation, evaluations, n=1)
            advice = f"there are: {', '.join(evaluations)}." if evaluations else "give the trainer `evaluations`."
            if close:
                advice = f"did you mean `{close[0]}/{self.metric.partition('/')[2]}`?"
            raise ArgumentError(
                f"`metric` is `{self.metric}`, but there is no evaluation `{self.evaluation}`; {advice}"
            )
        if not asked:  # who follows evaluations during the run acts on no others
            raise ArgumentError(
                f"`metric` is `{self.metric}`, which is followed during the run, but nothing asks for evaluations "
                f"before its end; ask for them by `Evaluate(every_updates=…)`."
            )

    def check_training(self, hook: Hook) -> None:
        """Check that training has put this metric, which is one of its own, if it has put any beside it.

        Raises:
            HookError: it has not, so `hook` would wait in vain.
        """
        place = self.metric.rpartition("/")[0]
        beside = [name for name in hook.trainer.storage.names() if name.rpartition("/")[0] == place]
        if beside and self.metric not in beside:
            raise HookError(
                f"hook `{hook.name}` follows `{self.metric}`, but training has no such metric; "
                f"{advice(self.metric, beside)}{_where_to_set(hook)}"
            )

    def value(self, hook: Hook, event: EvaluateEnd) -> float | None:
        """The metric in `event`; None when the event is of another evaluation, or of one that failed.

        Raises:
            HookError: the evaluation has no such metric.
        """
        if event.name != self.evaluation or not event.metrics:
            return None
        if self.metric not in event.metrics:
            raise HookError(
                f"hook `{hook.name}` follows `{self.metric}`, but the evaluation `{event.name}` has no such metric; "
                f"{advice(self.metric, event.metrics)}{_where_to_set(hook)}"
            )
        return event.metrics[self.metric]

    def state_dict(self) -> dict[str, str]:
        """What values that a checkpoint holds are of."""
        return {"metric": self.metric, "mode": self.mode}

    def differs(self, state: Mapping[str, Any]) -> str:
        """What to say if `state` is of another metric, whose values can't be compared with this one's; else ""."""
        metric, mode = state["metric"], state["mode"]
        if (metric, mode) == (self.metric, self.mode):
            return ""
        return f"follows `{self.metric}` ({self.mode}) instead of `{metric}` ({mode}), and begins afresh"

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` is finite, and better than `than` (None: than nothing)."""
        if not math.isfinite(value):
            return False
        gain = math.inf if than is None else than - value if self.mode == "min" else value - than
        return gain > self.min_delta

    def beats(self, value: float, other: float | None) -> bool:
        """Whether `value` is finite, and better than `other` (None: than nothing) by however little."""
        if not math.isfinite(value):
            return False
        return other is None or (value < other if self.mode == "min" else value > other)


def _where_to_set(hook: Hook) -> str:
    """Where the metric that `hook` follows is said, as the end of a message, which comes when a run has begun; what
    only tries a run has no folder."""
    if hook.name not in _KEYS:
        return ""
    another = (
        ", of another run that goes on from this one's checkpoint (`new_settings=True`; "
        "`--name ANOTHER --resume PATH`), since a run keeps its LR schedule"
    )
    where = another if hook.name == "Plateau" and hook.trainer.folder is not None else ""
    return f" Set its `metric`, in a run file `{_KEYS[hook.name]}`{where}."
