"""Writers: where metrics go, such as a file, a service or the screen. Their faults never reach the run.

Calls that a writer can't take wait for it. Before a new try it is closed and opened anew behind the last flushed
update, so that nothing half written stays. Calls before the first opening wait as well.
"""

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias, final

from evenstep.errors import ArgumentError, EvenstepError, clause
from evenstep.events.event import Event, Incident
from evenstep.events.metrics.pairs import Record

KEPT_CALLS = 1000
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""Method of the writer, "write" or "event", and its arguments."""


class Writer(ABC):
    """Base of all writers: opened when training begins, given every value of every metric once, closed at the end.

    Values come by update, but some come late, after others of their update. A trainer calls a writer that is also a
    `Hook` as a hook, too.

    >>> class Lowest(Writer):
    ...     def write(self, records):
    ...         print(min(record.value for record in records))
    """

    @property
    def name(self) -> str:
        """Name in messages: the name of the class, unless overridden."""
        return type(self).__name__

    @property
    def target(self) -> str:
        """Place that it writes to, for messages."""
        return "its target"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or continue after a resume.

        Args:
            folder: run folder; None for a run without one.
            update: number of committed updates. Values of later updates, from an earlier process, are to be dropped.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write records, which come by update."""

    def event(self, name: str, event: Event) -> None:
        """Note an event of the run: "train_begin", "train_end", "incident", or "shown" (a text or image)."""

    def flush(self) -> None:
        """Make written records readable for others; called after each `write`."""

    def close(self) -> None:
        """End; `close` again has no effect, and `open` may follow."""


def run_file(writer: Writer, folder: Path | None, name: str) -> Path:
    """Path `name` in the run folder, which is created; ArgumentError if the run has none."""
    if folder is None:
        raise ArgumentError(f"`{writer.name}` needs a run folder; give the trainer a `folder`.", field="folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


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
