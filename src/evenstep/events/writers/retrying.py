"""One writer, kept from doing harm: what it fails to take waits, and training goes on.

The first failure is an incident. Then the writer is left alone for a while, twice as long after each further failure,
and what comes in the meantime is kept for it. When it is tried again it is closed and opened anew behind what it had
taken last, so that nothing half written stays. What comes before it is opened (an evaluation before training, an
incident while resuming) is kept as well. It does not choose what is written.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, final

from evenstep.errors import EvenstepError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer

_update_of = attrgetter("update")
KEPT = 1000  # calls
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
Call: TypeAlias = tuple[str, tuple[Any, ...]]


@final
class RetryingWriter:
    """A writer, and what it is still to take; only `open` raises.

    Args:
        writer: closed.
        report: told of its first failure, and of what was lost in the end.
    """

    def __init__(self, writer: Writer, report: Callable[[Incident], None]) -> None:
        self._writer = writer
        self._report = report
        self._waiting: deque[Call] = deque()
        self._unflushed: deque[Call] = deque()  # writes that it has taken, perhaps into a buffer
        self._folder: Path | None = None
        self._written = self._latest = 0
        self._is_open = False
        self._lost = 0
        self._wait_s = self._next_try = 0.0

    def open(self, folder: Path | None, update: int) -> None:
        """Open it, then give it the events that have waited, and the records that are not after `update`.

        Raises:
            EvenstepError: it can't write to its place.
        """
        self._folder, self._written, self._latest = folder, update, update
        self._lost, self._wait_s = 0, 0.0
        try:
            self._writer.open(folder, update)
        except OSError as error:
            raise EvenstepError(
                f"writer `{self._writer.name}` cannot write {self._writer.target}: {error.strerror or error}; make "
                f"room or give it a place that it may write to, then resume the run."
            ) from error
        self._is_open = True
        events = [call for call in self._waiting if call[0] == "event"]
        self._waiting = deque([*events, *_until(update, (call for call in self._waiting if call[0] == "write"))])
        self._try()

    def write(self, records: Sequence[Record]) -> None:
        """Give it `records`, now or when it works again, and let others read them."""
        self._latest = max([self._latest, *map(_update_of, records)])
        self._take("write", records)
        if self._is_open and not self._wait_s:
            self._take("flush")

    def event(self, name: str, event: Event) -> None:
        """Tell it of an event, now or when it works again."""
        self._latest = max(self._latest, event.update)
        self._take("event", name, event)

    def rewind(self, update: int) -> None:
        """Have it forget what came after `update`, now or when it works again."""
        if not self._is_open:
            return
        self._written, self._latest = min(self._written, update), update
        self._waiting = deque(_until(update, [*self._unflushed, *self._waiting]))
        self._unflushed.clear()
        try:
            self._reopen()
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._failed(error)

    def close(self) -> None:
        """Try once more to give it what waits, and close it."""
        if self._is_open and (self._waiting or self._unflushed):
            self._waiting.append(("flush", ()))
            self._try()
            self._lost += sum(method != "flush" for method, _ in self._waiting)
            self._waiting.clear()
        self._is_open = False
        try:
            self._writer.close()
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._failed(error)
        if self._lost:
            calls = "1 call" if self._lost == 1 else f"{self._lost} calls"
            message = f"{self._named} did not take {calls} of metrics and events, lost to it."
            self._report(Incident(kind="writer", update=self._latest, message=message, rank=0))

    @property
    def works(self) -> bool:
        return self._is_open and not self._wait_s

    @property
    def _named(self) -> str:
        return f"writer `{self._writer.name}` of {self._writer.target}"

    def _take(self, method: str, *arguments: Any) -> None:
        self._waiting.append((method, arguments))
        if not self._is_open:
            return
        if len(self._waiting) > KEPT:
            self._waiting.popleft()
            self._lost += 1
        if not self._wait_s or monotonic() >= self._next_try:
            self._try()

    def _try(self) -> None:
        try:
            if self._wait_s:
                self._reopen()
            while self._waiting:
                method, arguments = self._waiting[0]
                getattr(self._writer, method)(*arguments)
                call = self._waiting.popleft()
                if method == "write":
                    self._unflushed.append(call)
                elif method == "flush":
                    self._written = max([self._written, *map(_last_update, self._unflushed)])
                    self._unflushed.clear()
            self._wait_s = 0.0
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._waiting.extendleft(reversed(self._unflushed))  # opened anew, it has them no more
            self._unflushed.clear()
            self._failed(error)

    def _reopen(self) -> None:
        with suppress(OSError):  # what it could not bring to its file is what waits here
            self._writer.close()
        self._writer.open(self._folder, self._written)

    def _failed(self, error: Exception) -> None:
        first, self._wait_s = not self._wait_s, min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        self._next_try = monotonic() + self._wait_s
        if first:
            cause = (isinstance(error, OSError) and error.strerror) or clause(error)
            message = f"{self._named} failed: {cause}; training goes on, and it is tried again later."
            trace = "".join(traceback.format_exception(error))
            self._report(Incident(kind="writer", update=self._latest, message=message, rank=0, traceback=trace))


def _last_update(write: Call) -> int:
    _, (records,) = write
    return max(map(_update_of, records))


def _until(update: int, calls: Iterable[Call]) -> Iterator[Call]:
    for method, arguments in calls:
        if method == "event" and arguments[1].update <= update:
            yield method, arguments
        elif method == "write":
            records = [record for record in arguments[0] if record.update <= update]
            if records:
                yield method, (records,)
