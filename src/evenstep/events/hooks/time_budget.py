"""Stop when a run has used its time: before a scheduler ends it in the midst of something.

The clock of `max_minutes` starts when training does, and again after each resume. That of `max_total_minutes` goes on
from what the checkpoint says, so what a lost start did after its last save counts for nothing; what a run that goes
back in place gives up has taken its time. How long a save takes must be left over: the budget ends the updates, not the
process.
"""

from time import monotonic
from typing import Any, final

from evenstep.errors import ArgumentError
from evenstep.events.event import TrainBegin, TrainEnd, UpdateEnd
from evenstep.events.hook import Hook


@final
class TimeBudget(Hook):
    """Asks to stop after `max_minutes`, to be resumed later, or after `max_total_minutes`, which completes the run.

    Args:
        max_minutes: of training since this start of the run, in minutes; None for no end.
        max_total_minutes: of training in all starts of the run together, in minutes; None for no end.

    Raises:
        ArgumentError: for no time at all, or one that is not above 0.

    >>> hook = TimeBudget(max_minutes=55, max_total_minutes=600)
    """

    def __init__(self, *, max_minutes: float | None = None, max_total_minutes: float | None = None) -> None:
        if max_minutes is None and max_total_minutes is None:
            raise ArgumentError("`TimeBudget` needs a time, but has none; set `max_minutes` or `max_total_minutes`.")
        self._max_minutes = max_minutes
        self._max_total_minutes = max_total_minutes
        self._earlier_s = 0.0
        self._began: float | None = None

    def before_train(self, event: TrainBegin) -> None:
        self._began = monotonic()
        self._ask_for_total()  # it may be used up already; a start's own never is, so each start gets somewhere

    def after_update(self, event: UpdateEnd) -> None:
        one = self._max_minutes
        if not self._ask_for_total() and one is not None and self._since_s() >= 60 * one:
            self.trainer.request_stop(f"its time budget of {one:g} minutes is used up", requeue=True)

    def after_train(self, event: TrainEnd) -> None:
        self._earlier_s, self._began = self._earlier_s + self._since_s(), None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._max_total_minutes is None else {"trained_s": self._earlier_s + self._since_s()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["trained_s"]
        # what a run that goes back in place has done was done in this time
        self._earlier_s = saved if self._began is None else max(self._earlier_s, saved - self._since_s())

    def _ask_for_total(self) -> bool:
        total = self._max_total_minutes
        if total is None or self._earlier_s + self._since_s() < 60 * total:
            return False
        self.trainer.request_stop(f"the time budget of {total:g} minutes for all starts of the run is used up")
        return True

    def _since_s(self) -> float:
        return 0.0 if self._began is None else monotonic() - self._began
