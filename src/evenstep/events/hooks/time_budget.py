"""Stop when a run has used its time: before a scheduler ends it in the midst of something.

The clock starts when training does, and again after each resume. How long a save takes must be left over: the budget
ends the updates, not the process.
"""

from time import monotonic
from typing import final

from evenstep.arguments import require_positive
from evenstep.events.event import TrainBegin, UpdateEnd
from evenstep.events.hook import Hook


@final
class TimeBudget(Hook):
    """Ask to stop, and to be run again, after `max_minutes`.

    Args:
        max_minutes: of training, in minutes.

    Raises:
        ArgumentError: for a time that is not above 0.

    >>> TimeBudget(max_minutes=55).name
    'TimeBudget'
    """

    first_rank_only = True

    def __init__(self, *, max_minutes: float) -> None:
        require_positive("max_minutes", max_minutes)
        self._max_minutes = max_minutes
        self._began = 0.0

    def before_train(self, event: TrainBegin) -> None:
        self._began = monotonic()

    def after_update(self, event: UpdateEnd) -> None:
        if monotonic() - self._began >= 60 * self._max_minutes:
            self.trainer.request_stop(f"its time budget of {self._max_minutes:g} minutes is used up", requeue=True)
