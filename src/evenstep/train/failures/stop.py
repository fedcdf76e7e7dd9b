"""Stop at the first incident: the default.

Nothing of the update was applied, so the run ends at its last committed update.
"""

from typing import final

from evenstep.events import Incident
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class Stop(FailurePolicy):
    """Always stops.

    >>> Stop()(Incident(kind="non_finite", update=3, message="", details={}))
    <Answer.STOP: 'stop'>
    """

    def __call__(self, incident: Incident) -> Answer:
        return Answer.STOP
