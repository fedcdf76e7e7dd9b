"""Writers whose faults never reach the run: calls that a writer can't take wait for it, and training goes on.

Before a new try the writer is closed and opened anew behind the last flushed update, so that nothing half written
stays. Calls before the first opening wait as well.
"""

import logging
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, final

from evenstep.errors import EvenstepError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.metrics.pairs import Record
from evenstep.events.writers.writer import Writer

KEPT_CALLS = 1000
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""Method of the writer, "write" or "event", and its arguments."""


@final
class RetryingWriter:
    """A writer and the calls that wait for it; only `open` raises, if the writer can't write to its place.

    `report` takes its first failure, and the number of lost calls at the end.
    """

    def __init__(self, writer: Writer, report: Callable[[Incident], None]) -> None:
        self._writer = writer
        self._report = report
        self._calls: list[Call] = []
        self._folder: Path | None = None
        self._flushed_update = 0
        self._latest_update = 0
        self._is_open = False
        self._lost = 0
        self._wait_s = 0.0
        """Time until the next try; 0 for a writer that works."""
        self._next_try = 0.0

    @property
    def works(self) -> bool:
        return self._is_open and not self._wait_s

    def open(self, folder: Path | None, update: int) -> None:
        """Open it, then make the waiting calls; waiting records of updates after `update` are dropped."""
        try:
            self._writer.open(folder, update)
        except EvenstepError:
            raise
        except Exception as error:
            raise EvenstepError(
                f"writer `{self._writer.name}` cannot write to {self._writer.target}: {clause(error)}; make room, log "
                f"in or give it another place, then resume the run."
            ) from error
        self._folder = folder
        self._flushed_update = update
        self._latest_update = update
        self._is_open = True
        self._lost = 0
        self._wait_s = 0.0
        events = [call for call in self._calls if call[0] == "event"]
        writes = [call for call in self._calls if call[0] == "write"]
        self._calls = [*events, *_until(update, writes)]
        self._try()

    def call(self, update: int, method: str, *arguments: Any) -> None:
        """Call `method` of the writer for `update`, now or when it works again."""
        self._latest_update = max(self._latest_update, update)
        self._calls.append((method, arguments))
        if not self._is_open:
            return
        if len(self._calls) > KEPT_CALLS:
            del self._calls[0]
            self._lost += 1
        if not self._wait_s or monotonic() >= self._next_try:
            self._try()

    def rewind(self, update: int) -> None:
        """Drop everything after `update`, now or when it works again."""
        if self._is_open:
            self._flushed_update = min(self._flushed_update, update)
            self._latest_update = update
            self._calls = list(_until(update, self._calls))
            self._try(anew=True)

    def close(self) -> None:
        """Try the waiting calls once more, and close it."""
        if self._is_open and self._calls:
            self._try()
            self._lost += len(self._calls)
            self._calls.clear()
        self._is_open = False
        try:
            self._writer.close()
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._fail(error)
        if self._lost:
            self._tell(f"lost {self._lost} call{'s' * (self._lost > 1)} of metrics and events.")

    def _try(self, *, anew: bool = False) -> None:
        try:
            if self._wait_s or anew:
                with suppress(OSError):  # calls that failed wait here
                    self._writer.close()
                self._writer.open(self._folder, self._flushed_update)
            while self._calls:
                method, arguments = self._calls[0]
                getattr(self._writer, method)(*arguments)
                if method == "write":
                    self._writer.flush()
                    self._flushed_update = max(self._flushed_update, *(record.update for record in arguments[0]))
                del self._calls[0]
            self._wait_s = 0.0
        except Exception as error:  # noqa: BLE001 - not lost: it is an incident
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        is_first = not self._wait_s
        self._wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        self._next_try = monotonic() + self._wait_s
        if is_first:
            trace = "".join(traceback.format_exception(error))
            self._tell(f"failed: {clause(error)}; training goes on, and it is tried again later.", trace)

    def _tell(self, said: str, trace: str = "") -> None:
        message = f"writer `{self._writer.name}` of {self._writer.target} {said}"
        self._report(Incident(kind="writer", update=self._latest_update, message=message, rank=0, traceback=trace))


@final
class Writers:
    """All writers of a run: each gets everything, in order.

    Args:
        report: takes the faults of writers as incidents; those that no writer can take are logged by `logging`, too.
    """

    def __init__(self, writers: Iterable[Writer], report: Callable[[Incident], None]) -> None:
        self._writers = tuple(RetryingWriter(writer, self._failed) for writer in writers)
        self._report = report

    def _failed(self, incident: Incident) -> None:
        self._report(incident)
        if not any(writer.works for writer in self._writers):
            logging.getLogger("evenstep").warning(incident.message)

    @contextmanager
    def opened(self, folder: Path | None, update: int) -> Generator[None]:
        """Open all writers, and close them at the end; raises EvenstepError if one can't write to its place."""
        with ExitStack() as opened:
            for writer in self._writers:
                opened.callback(writer.close)
                writer.open(folder, update)
            yield

    def write(self, records: Sequence[Record]) -> None:
        if records:
            latest = max(record.update for record in records)
            for writer in self._writers:
                writer.call(latest, "write", tuple(records))

    def event(self, name: str, event: Event) -> None:
        for writer in self._writers:
            writer.call(event.update, "event", name, event)

    def rewind(self, update: int) -> None:
        """Drop everything after `update`."""
        for writer in self._writers:
            writer.rewind(update)


def _until(update: int, calls: Iterable[Call]) -> Iterator[Call]:
    for method, arguments in calls:
        if method == "event" and arguments[1].update <= update:
            yield method, arguments
        elif method == "write":
            records = [record for record in arguments[0] if record.update <= update]
            if records:
                yield method, (records,)
