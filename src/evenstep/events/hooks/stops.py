"""Hooks that stop a run: no more improvement, no more time, a low learning rate, a file."""

from time import monotonic
from typing import Any, final

from evenstep.events.event import EvaluateEvent, TrainEvent, UpdateEvent
from evenstep.events.hook import Hook
from evenstep.events.hooks.target import MetricTarget, Mode
from evenstep.schema import Count, NonNegative, Positive

STOP_FILE = "stop"
STOP_FILE_EVERY_S = 1.0


@final
class EarlyStop(Hook):
    """Stops after `patience_evaluations` evaluations in a row without a new best value.

    A second evaluation of one update does not count. A resumed run that had stopped waits for as many again.

    Args:
        metric: an evaluation and its metric.
        mode: "min" if lower is better, "max" if higher is better.
        min_delta: least improvement, in units of the metric; it must be larger.

    >>> hook = EarlyStop(metric="valid/loss", patience_evaluations=3)
    """

    draws = False

    def __init__(
        self,
        metric: str = "valid/loss",
        mode: Mode = "min",
        *,
        patience_evaluations: Count,
        min_delta: NonNegative = 0.0,
    ) -> None:
        self.follows = MetricTarget(metric=metric, mode=mode, min_delta=min_delta)
        self._patience = patience_evaluations
        self.best_value: float | None = None
        self.evaluations_since_best = 0
        self._counted_at = -1

    def before_train(self, event: TrainEvent) -> None:
        if self.evaluations_since_best >= self._patience:
            self.evaluations_since_best = 0

    def after_evaluate(self, event: EvaluateEvent) -> None:
        value = self.follows.value(self, event)
        if value is None or event.update == self._counted_at:
            return
        self._counted_at = event.update
        self.evaluations_since_best += 1
        if self.follows.better(value, than=self.best_value):
            self.best_value = value
            self.evaluations_since_best = 0
        if self.evaluations_since_best >= self._patience:
            self.trainer.request_stop(
                f"`{self.follows.metric}` did not improve in {self.evaluations_since_best} evaluations (the best is "
                f"{self.best_value})"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.follows.state_dict(),
            "best_value": self.best_value,
            "evaluations_since_best": self.evaluations_since_best,
            "counted_at": self._counted_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        changed = self.follows.differs(state)
        if changed:
            self.best_value = None
            self.evaluations_since_best = 0
            return changed
        self.best_value = state["best_value"]
        self.evaluations_since_best = state["evaluations_since_best"]
        self._counted_at = state["counted_at"]
        if self.evaluations_since_best < self._patience:
            return None
        return f"had stopped the run after {self.evaluations_since_best} evaluations, and counts from 0 again"


@final
class TimeBudget(Hook):
    """Stops after `max_minutes` minutes of this start of the run, to be resumed later.

    Keep some time for the last checkpoint: the budget ends the updates, not the process.

    >>> hook = TimeBudget(max_minutes=55)
    """

    draws = False

    def __init__(self, *, max_minutes: Positive) -> None:
        self._minutes = max_minutes
        self._began = 0.0

    def before_train(self, event: TrainEvent) -> None:
        self._began = monotonic()

    def after_update(self, event: UpdateEvent) -> None:
        self.poll()

    def poll(self) -> None:
        if monotonic() - self._began >= 60 * self._minutes:
            self.trainer.request_stop(f"the time budget of {self._minutes:g} minutes is used up", requeue=True)


@final
class StopBelowLr(Hook):
    """Stops after an update whose learning rate was below `lr`, and not above the rate before it.

    The largest rate of the optimizer's groups counts; rates that are tensors are read in each update.

    >>> hook = StopBelowLr(1e-6)
    """

    draws = False

    def __init__(self, lr: Positive) -> None:
        self._lr = lr
        self._before: float | None = None

    def after_update(self, event: UpdateEvent) -> None:
        if not event.committed:
            return
        rate = max(float(group["lr"]) for group in self.trainer.optimizer.param_groups)
        if self._before is not None and rate <= self._before and rate < self._lr:
            self.trainer.request_stop(f"the learning rate has fallen to {rate:.6g}, below {self._lr:g}")
        self._before = rate

    def state_dict(self) -> dict[str, Any]:
        return {"rate_before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = state["rate_before"]


@final
class StopFile(Hook):
    """Stops, with exit code 75, when there is a file `stop` in the run folder, which it removes.

    It looks about once a second.

    >>> hook = StopFile()
    """

    first_rank_only = True
    draws = False

    def __init__(self) -> None:
        self._looked_at = 0.0

    def after_update(self, event: UpdateEvent) -> None:
        self.poll()

    def poll(self) -> None:
        now = monotonic()
        folder = self.trainer.folder
        if folder is None or now - self._looked_at < STOP_FILE_EVERY_S:
            return
        self._looked_at = now
        file = folder / STOP_FILE
        if file.exists():
            file.unlink(missing_ok=True)
            self.trainer.request_stop(f"there was a file `{file}`", requeue=True)
