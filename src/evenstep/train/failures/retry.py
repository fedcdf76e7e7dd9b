"""Try the same update again: for what changes with the next try (a finer cut, a lower loss scale), or has passed.

Without a limit, what it retries must end by itself, as cutting does at one sample and the loss scale at its floor.
"""

from typing import final

from evenstep.errors import ArgumentError
from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class Retry(FailurePolicy):
    """Retries, and stops when the same update has failed more than `limit` times; None for no limit.

    Args:
        limit: how many times in a row.

    >>> retry = Retry(limit=1)
    >>> incident = Incident(kind="non_finite", update=3, message="")
    >>> retry(incident), retry(incident)
    (<Answer.RETRY: 'retry'>, <Answer.STOP: 'stop'>)
    """

    def __init__(self, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ArgumentError(f"`limit` must be at least 1, but is {limit}; use `Stop()` to retry nothing.")
        self._limit = limit
        self._update = -1
        self._in_a_row = 0

    def __call__(self, incident: Incident) -> Answer:
        self._in_a_row = self._in_a_row + 1 if incident.update == self._update else 1
        self._update = incident.update
        return Answer.RETRY if self._limit is None or self._in_a_row <= self._limit else Answer.STOP
