"""What to do about an incident: the seam.

A policy turns an incident into one answer. It only decides; the loop carries the answer out, the same on all ranks.
"""

from abc import ABC, abstractmethod
from enum import Enum
from typing import final

from evenstep.events import Incident


@final
class Answer(Enum):
    """What is done about an incident."""

    STOP = "stop"  # end the run with an error; everything before the update is kept
    SKIP = "skip"  # give its global batch up and go on with the next one; the update count does not move
    RETRY = "retry"  # try the same update again
    REWIND = "rewind"  # go back to the last checkpoint before it, in place
    REWIND_PAST = "rewind_past"  # go back, and give up the global batches from there to the offending one


class FailurePolicy(ABC):
    """Answers incidents of one kind.

    Attributes:
        note: what is to be said about its last answer, or "".
    """

    note: str = ""

    @abstractmethod
    def __call__(self, incident: Incident) -> Answer:
        """What to do about `incident`."""
