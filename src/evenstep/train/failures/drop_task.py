"""Drop the contribution of a task that fails, and keep that of the others.

The aborted update is tried again, with the same batch, without the tasks that are to blame: what is applied is exactly
the update in which they were absent. It is not for runs of one task.
"""

from typing import final

from evenstep.arguments import require_whole
from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class DropTask(FailurePolicy):
    """Drops tasks from an update, and stops where no task is to blame, or too many updates in a row lose one.

    It also takes what a task raises (in `weight`, `transform`, the model's forward or `loss`) for a failure of that
    task, so that no rank leaves the others waiting. What a backward or the data raise still ends the run.

    Args:
        limit: how many updates in a row may lose a task.

    >>> drop = DropTask(limit=1)
    >>> bad = {"tasks": ["box"]}
    >>> [drop(Incident(kind="non_finite", update=u, message="", details=bad)).name for u in (3, 4, 9)]
    ['DROP', 'STOP', 'DROP']
    """

    tolerates_errors = True

    def __init__(self, *, limit: int = 10) -> None:
        require_whole("limit", limit, at_least=1, advice="use `Stop()` to drop nothing")
        self._limit = limit
        self._update = -2
        self._in_a_row = 0

    def __call__(self, incident: Incident) -> Answer:
        if not incident.details.get("tasks"):
            return Answer.STOP
        if incident.update != self._update:
            self._in_a_row = self._in_a_row + 1 if incident.update == self._update + 1 else 1
        self._update = incident.update
        return Answer.DROP if self._in_a_row <= self._limit else Answer.STOP
