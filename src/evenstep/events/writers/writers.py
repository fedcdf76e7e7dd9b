"""All writers of a run as one: each gets everything, and a fault of one does not concern the others or the run."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.retrying import RetryingWriter
from evenstep.events.writers.writer import Writer


@final
class Writers:
    """Gives everything to each of `writers`, in order; what comes while they are closed waits for the next opening.

    Args:
        writers: in the order in which they are given things.
        report: takes the faults of writers as incidents. One that no other writer can be told of goes to Python's
            `logging` as well, which writes it on standard error.

    >>> class Print(Writer):
    ...     def write(self, records):
    ...         print(*records)
    >>> writers = Writers([Print()], report=print)
    >>> with writers.opened(None, 0):
    ...     writers.write([Record(1, "loss", 0.5, 8.0)])
    Record(update=1, name='loss', value=0.5, weight=8.0)
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
        """Open all writers, and close them whatever happens inside.

        Raises:
            EvenstepError: one can't write to its place.
        """
        opened: list[RetryingWriter] = []
        try:
            for writer in self._writers:
                opened.append(writer)
                writer.open(folder, update)
            yield
        finally:
            for writer in opened:
                writer.close()

    def write(self, records: Sequence[Record]) -> None:
        """Give `records` to every writer, and let others read them."""
        if records:
            shared = tuple(records)  # which none of them can change for the others
            for writer in self._writers:
                writer.write(shared)

    def event(self, name: str, event: Event) -> None:
        """Tell every writer about an event of the run."""
        for writer in self._writers:
            writer.event(name, event)

    def rewind(self, update: int) -> None:
        """Let every open writer forget what came after `update`."""
        for writer in self._writers:
            writer.rewind(update)
