"""The seam for where metrics go: a file, a service, the screen.

A writer is opened when training begins, is given every value of every metric exactly once, in order of updates, and
is closed when training ends, however it ends. It has no say in what is measured or how often.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from evenstep.errors import ArgumentError
from evenstep.events.event import Event, Json
from evenstep.events.series import Record


class Writer(ABC):
    """Base of all writers.

    Values may come late: a writer must accept a record of an update of which it has written other records already.

    >>> class Lowest(Writer):
    ...     def write(self, records):
    ...         print(min(record.value for record in records))
    >>> Lowest().write([Record(1, "train/loss", 0.5, 32.0), Record(2, "train/loss", 0.25, 32.0)])
    0.25
    """

    @property
    def name(self) -> str:
        """What messages call this writer; the class name unless overridden."""
        return type(self).__name__

    @property
    def target(self) -> str:
        """Where it writes, for messages."""
        return "its target"

    def open(self, folder: Path | None, update: int) -> None:
        """Begin, or go on after a resume.

        Args:
            folder: the run folder; None for a run without one.
            update: the updates committed so far. What an earlier process wrote about later ones is to be dropped,
                because they are about to happen again.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Take records, which come by update."""

    def event(self, name: str, event: Event) -> None:
        """Take note of an event of the run: "train_begin", "train_end", "incident", or "shown", a text or an image.

        What it can't show a writer ignores; the file `shown.jsonl` of `JsonlWriter` has all of it.
        """

    def flush(self) -> None:
        """Bring what was taken to where others can read it; called after each `write`."""

    def close(self) -> None:
        """End; doing it twice is as good as once, and `open` may follow."""


def run_file(writer: Writer, folder: Path | None, name: str) -> Path:
    """The path `name` in the run folder, which exists afterwards.

    Raises:
        ArgumentError: the run has no folder.
    """
    if folder is None:
        raise ArgumentError(
            f"`{writer.name}` writes into the run folder, but this run has none; give the trainer a `folder`."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def flat(config: Mapping[str, Json], outer: str = "") -> dict[str, str | int | float | bool]:
    """The values of `config`, as services take them, by dotted keys; a list is text, and what is None is left out.

    >>> flat({"train": {"updates": 100, "ema": None}, "betas": [0.9, 0.95], "seed": 1})
    {'train.updates': 100, 'betas': '[0.9, 0.95]', 'seed': 1}
    """
    values: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(cast("Mapping[str, Json]", value), f"{outer}{name}.")
        elif value is not None:
            values[f"{outer}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return values
