"""All writers of a run as one: each gets everything, and a fault of one does not keep it from the others.

What comes while they are closed (an evaluation before training, an incident while resuming) waits for the next
opening. A fault leaves here as an error, an `OSError` as one that names writer, file and cause; or, once all are open,
as an incident, if somebody takes those. It holds no period.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

from evenstep.errors import EvenstepError, HookError
from evenstep.events.deliver import Receiver, deliver
from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.outlet import Outlet
from evenstep.events.writers.writer import Writer


@final
class Writers:
    """Gives everything to each of `writers`, in order.

    Args:
        writers: in the order in which they are given things.
        report: takes the faults of open writers as incidents; None raises them.

    Raises:
        HookError: for something that is not a writer.

    >>> class Print(Writer):
    ...     def write(self, records):
    ...         print(*records)
    >>> writers = Writers([Print()])
    >>> with writers.opened(None, 0):
    ...     writers.write([Record(1, "loss", 0.5, 8.0)])
    Record(update=1, name='loss', value=0.5, weight=8.0)
    """

    def __init__(self, writers: Iterable[Writer], report: Callable[[Incident], None] | None = None) -> None:
        self._writers = tuple(_checked(writer) for writer in writers)
        self._report = report
        self._outlets: list[Outlet] | None = None
        self._opened: list[Writer] = []
        self._is_open = False
        self._waiting_records: list[Record] = []
        self._waiting_events: list[tuple[str, Event]] = []

    @contextmanager
    def opened(self, folder: Path | None, update: int) -> Generator[None]:
        """Open all writers, and close them whatever happens inside."""
        self.open(folder, update)
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def open(self, folder: Path | None, update: int) -> None:
        """Open all writers, then give them what has waited; on a fault, those opened are closed again."""
        self._opened = []
        try:
            for writer in self._writers:
                self._opened.append(writer)
                self._each("open", folder, update, writers=[writer])
            self._is_open = True
            if self._report is not None:
                self._outlets = [Outlet(writer, folder, update, self._report) for writer in self._writers]
            events, self._waiting_events = self._waiting_events, []
            records, self._waiting_records = self._waiting_records, []
            for name, event in events:
                self.event(name, event)
            self.write([record for record in records if record.update <= update])
        except BaseException as error:
            self._close(error)
            raise

    def write(self, records: Sequence[Record]) -> None:
        """Give `records` to every writer, and let others read them."""
        if not records or not self._writers:
            return
        if self._outlets is not None:
            for outlet in self._outlets:
                outlet.write(records)
                outlet.flush()
        elif self._is_open:
            self._each("write", records)
            self._each("flush")
        else:
            self._waiting_records += records

    def event(self, name: str, event: Event) -> None:
        """Tell every writer about an event of the run."""
        if self._outlets is not None:
            for outlet in self._outlets:
                outlet.event(name, event)
        elif self._is_open:
            self._each("event", name, event)
        elif self._writers:
            self._waiting_events.append((name, event))

    def rewind(self, update: int) -> None:
        """Let every open writer forget what came after `update`."""
        for outlet in self._outlets or ():
            outlet.rewind(update)

    def flush(self) -> None:
        """Flush every writer that is open."""
        if self._outlets is not None:
            for outlet in self._outlets:
                outlet.flush()
        else:
            self._each("flush", writers=self._opened)

    def close(self) -> None:
        """Close every writer, also after one of them has failed to."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        opened, self._opened, self._is_open = self._opened, [], False
        outlets, self._outlets = self._outlets, None
        if outlets is not None:
            for outlet in outlets:
                outlet.close()
            return
        self._each("close", writers=opened, error=error)

    def _each(
        self,
        method: str,
        *arguments: object,
        writers: Sequence[Writer] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Call `method` of each; raise the first fault, unless `error` is in flight: then it gets them as notes."""
        receivers = [_receiver(writer, method) for writer in (self._writers if writers is None else writers)]
        fault = deliver(receivers, *arguments, error=error)
        try:
            if fault is not error and fault is not None:
                raise fault
        finally:
            del fault, error  # their tracebacks hold this frame: keeping them here would be a cycle


def _receiver(writer: Writer, method: str) -> Receiver:
    return f"`{method}` of writer `{writer.name}`", partial(_named, writer, getattr(writer, method))


def _named(writer: Writer, method: Any, *arguments: object) -> None:
    try:
        method(*arguments)
    except OSError as error:
        raise EvenstepError(
            f"writer `{writer.name}` cannot write {writer.target}: {error.strerror or error}; make room or give it a "
            f"place that it may write to, then resume the run."
        ) from error


def _checked(writer: object) -> Writer:
    if not isinstance(writer, Writer):
        what = f"the class `{writer.__name__}`; give an instance" if isinstance(writer, type) else f"`{writer!r}`"
        raise HookError(f"`writers` must hold instances of subclasses of `Writer`, but holds {what}.")
    return writer
