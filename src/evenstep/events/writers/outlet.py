"""One writer, kept from doing harm: what it fails to take waits, and training goes on.

The first failure is an incident. Then the writer is left alone for a while, twice as long after each further failure,
and what comes in the meantime is kept for it. When it is tried again it is closed and opened anew behind what it had
taken last, so that nothing half written stays. It does not choose what is written.
"""

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, final

from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer

KEPT = 1000  # calls
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


@final
class Outlet:
    """What one writer is still to take.

    Args:
        writer: open.
        folder: that it was opened with.
        update: likewise.
        report: told of its first failure, and of what was lost in the end.
    """

    def __init__(self, writer: Writer, folder: Path | None, update: int, report: Callable[[Incident], None]) -> None:
        self._writer = writer
        self._folder = folder
        self._written = update
        self._latest = update
        self._report = report
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._lost = 0
        self._wait_s = 0.0
        self._next_try = 0.0

    def write(self, records: Sequence[Record]) -> None:
        """Give it `records`, now or when it works again."""
        self._take("write", records)

    def event(self, name: str, event: Event) -> None:
        """Tell it of an event, now or when it works again."""
        self._latest = max(self._latest, event.update)
        self._take("event", name, event)

    def flush(self) -> None:
        """Flush it, if it works."""
        if not self._wait_s:
            self._take("flush")

    def rewind(self, update: int) -> None:
        """Have it forget what came after `update`, now or when it works again."""
        self._written, self._latest = min(self._written, update), update
        kept = [_until(update, method, arguments) for method, arguments in self._waiting]
        self._waiting = deque(call for call in kept if call is not None)
        try:
            self._reopen()
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._failed(error)

    def close(self) -> None:
        """Try once more to give it what waits, and close it."""
        if self._waiting:
            self._try()
        if self._waiting:
            self._lost += len(self._waiting)
            self._waiting.clear()
        try:
            self._writer.close()
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._failed(error)
        if self._lost:
            message = f"{self._named} did not take {self._lost} calls of metrics and events, which are lost to it."
            self._report(Incident(kind="writer", update=self._latest, message=message, rank=0))

    @property
    def _named(self) -> str:
        return f"writer `{self._writer.name}` of {self._writer.target}"

    def _take(self, method: str, *arguments: Any) -> None:
        self._waiting.append((method, arguments))
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
                self._waiting.popleft()
                if method == "write":
                    self._written = max(self._written, *(record.update for record in arguments[0]))
            self._wait_s = 0.0
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._failed(error)

    def _reopen(self) -> None:
        with suppress(OSError):  # what it could not bring to its file is what waits here
            self._writer.close()
        self._writer.open(self._folder, self._written)

    def _failed(self, error: Exception) -> None:
        first, self._wait_s = not self._wait_s, min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        self._next_try = monotonic() + self._wait_s
        if first:
            cause = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            message = f"{self._named} failed: {cause}; training goes on, and it is tried again later."
            trace = "".join(traceback.format_exception(error))
            self._report(Incident(kind="writer", update=self._latest, message=message, rank=0, traceback=trace))


def _until(update: int, method: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]] | None:
    """What of a call is not after `update`; None for nothing."""
    if method == "event":
        return (method, arguments) if arguments[1].update <= update else None
    records = [record for record in arguments[0] if record.update <= update] if method == "write" else []
    return (method, (records,)) if records else None
