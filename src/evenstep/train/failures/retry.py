"""Try the same update again: for what changes with the next try (a finer cut, a lower loss scale), or has passed.

What changes with each try ends by itself, as cutting does at one sample and the loss scale at its floor. What does not
is tried once more: a fault that has passed is gone then, and one that has not would be tried for ever.
"""

from typing import final

from evenstep.arguments import require_whole
from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy

_END_BY_THEMSELVES = ("out_of_memory", "overflow")


@final
class Retry(FailurePolicy):
    """Retries, and stops when the same update has failed more than `limit` times.

    Args:
        limit: how many times in a row; None for once, and for no limit where each try is another one: a finer cut of a
            micro-batch that does not fit, a lower loss scale.

    >>> retry = Retry()
    >>> incident = Incident(kind="non_finite", update=3, message="")
    >>> retry(incident), retry(incident)
    (<Answer.RETRY: 'retry'>, <Answer.STOP: 'stop'>)
    >>> retry.note
    'It was tried again once, which is the limit.'
    """

    def __init__(self, *, limit: int | None = None) -> None:
        if limit is not None:
            require_whole("limit", limit, at_least=1, advice="use `Stop()` to retry nothing")
        self._limit = limit
        self._update = -1
        self._in_a_row = 0

    def __call__(self, incident: Incident) -> Answer:
        self._in_a_row = self._in_a_row + 1 if incident.update == self._update else 1
        self._update = incident.update
        limit = self._limit
        if limit is None:
            if incident.kind in _END_BY_THEMSELVES:
                self.note = ""
                return Answer.RETRY
            limit = 1
        times = "once" if limit == 1 else f"{limit} times"
        if self._in_a_row > limit:
            self.note = f"It was tried again {times}, which is the limit."
            return Answer.STOP
        self.note = f"It is tried again, {times} at most."
        return Answer.RETRY
