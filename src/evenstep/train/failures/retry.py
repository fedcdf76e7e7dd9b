"""Try the same update again: for incidents that change what the next try does, as a lowered loss scale does.

It has no limit of its own; what it retries must end by itself, as the loss scale does at its floor.
"""

from typing import final

from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class Retry(FailurePolicy):
    """Always retries.

    >>> Retry()(Incident(kind="overflow", update=3, message="", details={}))
    <Answer.RETRY: 'retry'>
    """

    def __call__(self, incident: Incident) -> Answer:
        return Answer.RETRY
