"""Base class of writers: where metrics go, such as a file, a service or the screen."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from evenstep.errors import ArgumentError
from evenstep.events.event import Event
from evenstep.events.metrics.pairs import Record


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
