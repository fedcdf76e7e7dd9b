"""The last things that a rank said to the others or waited for: what one looks at when ranks wait for each other.

Each record costs a few hundred nanoseconds and nothing is written until somebody asks. It judges nothing.
"""

from collections import deque
from dataclasses import dataclass
from datetime import datetime
from time import time
from typing import final

KEPT = 64


@final
@dataclass(slots=True)
class CollectiveRecord:
    """One collective, or one message.

    Args:
        number: counted from 1; the same on all ranks for the same collective, as long as they say the same.
        num_bytes: of this rank's part.
        began: in seconds since the epoch.
        ended: likewise; None while it waits.
    """

    number: int
    what: str
    num_bytes: int
    update: int
    began: float
    ended: float | None = None

    def __str__(self) -> str:
        began = datetime.fromtimestamp(self.began).isoformat(sep=" ", timespec="milliseconds")
        took = "has not ended" if self.ended is None else f"took {self.ended - self.began:.4f} s"
        return f"{self.number} {self.what}, {self.num_bytes} bytes, update {self.update}, began {began}, {took}"


@final
class FlightRecorder:
    """Records what one rank says.

    Attributes:
        update: that is being computed.
        waited_s: for other ranks, in all.

    >>> recorder = FlightRecorder()
    >>> recorder.update = 3
    >>> record = recorder.begin("sum numbers", 16)
    >>> "1 sum numbers, 16 bytes, update 3" in str(recorder.last()[0]), "has not ended" in recorder.last()[0]
    (True, True)
    """

    def __init__(self) -> None:
        self.update = 0
        self.waited_s = 0.0
        self._records: deque[CollectiveRecord] = deque(maxlen=KEPT)
        self._count = 0

    def begin(self, what: str, num_bytes: int) -> CollectiveRecord:
        """Record that something begins; `end` it with the record."""
        self._count += 1
        record = CollectiveRecord(self._count, what, num_bytes, self.update, time())
        self._records.append(record)
        return record

    def end(self, record: CollectiveRecord, *, waited_s: float) -> None:
        """It has come to its end, for which this rank has waited so long."""
        record.ended = time()
        self.waited_s += waited_s

    def last(self) -> list[str]:
        """The last records, the oldest first."""
        return [str(record) for record in self._records]
