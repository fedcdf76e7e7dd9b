"""Skip the global batch of an incident, but not for ever.

A run in which one update fails again and again, batch after batch, has diverged; skipping would only hide it.
"""

from typing import final

from evenstep.arguments import require_whole
from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class Skip(FailurePolicy):
    """Skips, and stops when the same update has failed with more than `limit` global batches.

    Args:
        limit: how many global batches in a row may be skipped.

    >>> skip = Skip(limit=1)
    >>> incident = Incident(kind="non_finite", update=3, message="", details={})
    >>> skip(incident), skip(incident)
    (<Answer.SKIP: 'skip'>, <Answer.STOP: 'stop'>)
    """

    def __init__(self, *, limit: int = 10) -> None:
        require_whole("limit", limit, at_least=1, advice="use `Stop()` to skip nothing")
        self._limit = limit
        self._update = -1
        self._in_a_row = 0

    def __call__(self, incident: Incident) -> Answer:
        self._in_a_row = self._in_a_row + 1 if incident.update == self._update else 1
        self._update = incident.update
        return Answer.SKIP if self._in_a_row <= self._limit else Answer.STOP
