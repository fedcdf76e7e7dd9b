"""The metrics on the screen: one live line on a terminal, a plain line every few updates elsewhere.

Training metrics are averaged over the updates since the last line, learning rates are the latest; the values of an
evaluation are shown whenever they come. Training metrics of three parts and those of the timer are left to the files.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TextIO, final

from evenstep.events.arguments import require_count
from evenstep.events.event import Event, TrainBegin, TrainEnd
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer

_LATEST = ("train/lr",)
_REFRESH_S = 0.2


@final
class ConsoleWriter(Writer):
    """Shows metrics to whoever watches.

    Args:
        every_updates: updates per plain line, and per average.
        stream: standard output unless given.

    >>> writer = ConsoleWriter(every_updates=2, stream=sys.stdout)
    >>> writer.open(None, 0)
    >>> writer.write([Record(1, "train/loss", 3.0, 1.0), Record(2, "train/loss", 1.0, 3.0)])
    ... # doctest: +ELLIPSIS
    update 2  loss 1.5  ... updates/s
    """

    def __init__(self, *, every_updates: int = 10, stream: TextIO | None = None) -> None:
        require_count("every_updates", every_updates)
        self._every = every_updates
        self._stream = stream
        self._window: dict[str, tuple[float, float]] = {}
        self._updates: int | None = None
        self._live: _Live | None = None
        self._begin(0)

    @property
    def target(self) -> str:
        return "the screen"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._updates = None
        self._begin(update)
        stream = self._stream or sys.stdout
        if stream.isatty():
            self._live = _Live(stream)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainBegin):
            self._updates = event.updates
            if self._live is not None:
                self._live.show(event.update, self._updates, self._place(event.update))
        elif isinstance(event, TrainEnd) and self._window:
            self._line(self._written)

    def write(self, records: Sequence[Record]) -> None:
        now, last = perf_counter(), max((record.update for record in records), default=self._written)
        if last > self._written:
            self._rate = (last - self._written) / max(now - self._written_at, 1e-9)
            self._written, self._written_at = last, now
        for update, group in groupby(records, key=itemgetter(0)):
            self._one(update, list(group))

    def close(self) -> None:
        if self._window:
            self._line(self._written)
        if self._live is not None:
            self._live.close()
            self._live = None

    def _begin(self, update: int) -> None:
        self._first = self._written = update
        self._first_at = self._written_at = perf_counter()
        self._rate = 0.0
        self._window.clear()

    def _one(self, update: int, records: Iterable[Record]) -> None:
        evaluated: list[str] = []
        for _, name, value, weight in records:
            part, _, rest = name.partition("/")
            if part == "perf" or (part == "train" and "/" in rest):
                continue
            if part != "train":
                evaluated.append(f"{name} {value:.4g}")
                continue
            total, weights = self._window.get(rest, (0.0, 0.0))
            self._window[rest] = (value, 1.0) if name in _LATEST else (total + value * weight, weights + weight)
        if update % self._every == 0 and self._window:
            self._line(update)
        if evaluated:
            self._print(f"{self._place(update)}  {'  '.join(evaluated)}")

    def _line(self, update: int) -> None:
        values = [f"{name} {total / weight:.4g}" for name, (total, weight) in self._window.items()]
        self._window.clear()
        values.append(f"{self._rate:.3g} updates/s")
        done = self._written - self._first
        if self._updates is not None and done:
            left_s = (self._updates - update) * (perf_counter() - self._first_at) / done
            values.append(f"{_clock(left_s)} left")
        line = "  ".join([self._place(update), *values])
        if self._live is None:
            self._print(line)
        else:
            self._live.show(update, self._updates, line)

    def _place(self, update: int) -> str:
        return f"update {update}" if self._updates is None else f"update {update}/{self._updates}"

    def _print(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._stream or sys.stdout, flush=True)
        else:
            self._live.print(line)


@final
class _Live:
    """A line that is drawn again and again, by this thread only, at the bottom of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        bar = BarColumn(16, table_column=Column(width=16))
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._progress = Progress(bar, text, console=Console(file=stream), auto_refresh=False)
        self._task = self._progress.add_task("", total=None)
        self._drawn_at = 0.0
        self._progress.start()

    def show(self, update: int, updates: int | None, line: str) -> None:
        self._progress.update(self._task, completed=update, total=updates, description=line)
        if (now := perf_counter()) - self._drawn_at > _REFRESH_S:
            self._drawn_at = now
            self._progress.refresh()

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
