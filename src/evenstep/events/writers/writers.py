"""All writers of a run as one: each gets everything, and a fault of one does not concern the others or the run."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from evenstep.arguments import require_method, said
from evenstep.errors import HookError
from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.retrying import RetryingWriter
from evenstep.events.writers.writer import Writer

_TAKES = {
    "open": ("folder", "update"),
    "write": ("records",),
    "event": ("name", "event"),
    "flush": (),
    "close": (),
}


@final
class Writers:
    """Gives everything to each of `writers`, in order; what comes while they are closed waits for the next opening.

    Args:
        writers: in the order in which they are given things.
        report: takes the faults of writers as incidents. One that no other writer can be told of goes to Python's
            `logging` as well, which writes it on standard error.

    Raises:
        HookError: for something that is not a writer, one given twice, or a method that does not take what it is given.

    >>> class Print(Writer):
    ...     def write(self, records):
    ...         print(*records)
    >>> writers = Writers([Print()], report=print)
    >>> with writers.opened(None, 0):
    ...     writers.write([Record(1, "loss", 0.5, 8.0)])
    Record(update=1, name='loss', value=0.5, weight=8.0)
    """

    def __init__(self, writers: Iterable[Writer], report: Callable[[Incident], None]) -> None:
        given = [_checked(writer) for writer in writers]
        for place, one in enumerate(given):
            if any(one is other for other in given[:place]):
                raise HookError(f"writer `{one.name}` is given twice; give it once, or make two of its class.")
        self._writers = tuple(RetryingWriter(writer, self._failed) for writer in given)
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


def _checked(writer: object) -> Writer:
    if not isinstance(writer, Writer):
        what = f"the class `{writer.__name__}`" if isinstance(writer, type) else said(writer)
        write = "give an instance" if isinstance(writer, type) else "write a subclass, or give one by name, 'csv'"
        raise HookError(f"`writers` must hold instances of subclasses of `Writer`, but holds {what}; {write}.")
    for name, arguments in _TAKES.items():
        takes = " and ".join(f"`{one}`" for one in arguments) or "no argument"
        require_method(f"`{name}` of writer `{writer.name}`", getattr(writer, name), arguments, takes, HookError)
    return writer
