"""Go back to the last checkpoint before the incident, in place, as large runs do by hand.

With `past_data` the global batches from there to the offending one are given up; without, they are taken again, which
is exact, and enough where the fault was a passing one. A run that goes back again and again has another fault.
"""

from typing import final

from evenstep.arguments import require_whole
from evenstep.events import Incident
from evenstep.options import MAX_REWINDS
from evenstep.train.failures.policy import Answer, FailurePolicy


@final
class Rewind(FailurePolicy):
    """Rewinds, `limit` times in all, and stops then.

    Args:
        past_data: whether the data up to the offending global batch are left out.

    >>> rewind = Rewind(limit=1)
    >>> incident = Incident(kind="loss_spike", update=3, message="")
    >>> rewind(incident), rewind(incident)
    (<Answer.REWIND: 'rewind'>, <Answer.STOP: 'stop'>)
    """

    def __init__(self, *, past_data: bool = False, limit: int = MAX_REWINDS) -> None:
        require_whole("limit", limit, at_least=1, advice="use `Stop()` to never go back")
        self._answer = Answer.REWIND_PAST if past_data else Answer.REWIND
        self._left = limit

    def __call__(self, incident: Incident) -> Answer:
        self._left -= 1
        return self._answer if self._left >= 0 else Answer.STOP
