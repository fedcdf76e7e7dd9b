"""Metrics on the screen: a line every few updates, and a live line on a terminal or in a notebook."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import TextIO, final

from evenstep.events.event import Event, TrainEvent
from evenstep.events.metrics.series import Record
from evenstep.events.writers.live import LiveLine, Progress, clock, live_on, per_second
from evenstep.events.writers.writer import Writer

_LATEST = ("lr", "loss_scale")
"""Training metrics that are not averaged."""
_LINE_S = 1.0
"""Least time between two lines above a live one."""


@final
class ConsoleWriter(Writer):
    """Prints metrics.

    A line shows training metrics averaged over the updates since the last line, and the newest learning rate. A live
    line shows the newest settled values; there is then at most one line a second. The values of an evaluation are one
    line. Metrics of groups and layers, and of speed and memory, are left to the files.

    Args:
        every_updates: updates per line, and per average.
        stream: standard output by default.

    >>> writer = ConsoleWriter(every_updates=2, stream=sys.stdout)
    >>> writer.open(None, 0)
    >>> writer.write([Record(1, "train/loss", 3.0, 1.0), Record(2, "train/loss", 1.0, 3.0)])
    ... # doctest: +ELLIPSIS
    update 2  loss 1.5  ... updates/s
    """

    def __init__(self, *, every_updates: int = 10, stream: TextIO | None = None) -> None:
        self._every = every_updates
        self._stream = stream
        self._updates: int | None = None
        self._live: LiveLine | None = None
        self._committed: Callable[[], int] | None = None
        self._widths: dict[str, int] = {}
        """Width of each column so far, by the name of the metric."""
        self._begin(0)

    @property
    def target(self) -> str:
        return "the screen"

    def follow(self, committed: Callable[[], int]) -> None:
        """Leave evaluations to the hook `Console`, and read the number of committed updates from it, in a thread."""
        self._committed = committed

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._updates = None
        self._begin(update)
        self._live = live_on(self._stream or sys.stdout, self._progress)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainEvent) and event.outcome == "running":
            self._updates = event.updates
            if self._live is not None:
                self._live.draw()
        elif isinstance(event, TrainEvent) and self._window:
            self._print_window(self._written)

    def write(self, records: Sequence[Record]) -> None:
        now = perf_counter()
        last = max((record.update for record in records), default=self._written)
        if last > self._written:
            self._rate = (last - self._written) / max(now - self._written_at, 1e-9)
            self._written = last
            self._written_at = now
        for update, group in groupby(records, key=lambda record: record.update):
            self._take(update, list(group))

    def print_evaluation(self, update: int, metrics: Mapping[str, float], *more: str) -> None:
        """Print the metrics of an evaluation."""
        self._print(update, [*self._cells(metrics), *more])

    def close(self) -> None:
        if self._window:
            self._print_window(self._written)
        if self._live is not None:
            self._live.close()
            self._live = None

    def _begin(self, update: int) -> None:
        self._first = update
        self._written = update
        self._first_at = perf_counter()
        self._written_at = self._first_at
        self._rate = 0.0
        self._window: dict[str, tuple[float, float]] = {}
        """Sum and weight of training metrics since the last line."""
        self._newest: dict[str, float] = {}
        self._line_at = -_LINE_S

    def _take(self, update: int, records: Iterable[Record]) -> None:
        evaluated: dict[str, float] = {}
        for _, name, value, weight in records:
            part, _, metric = name.partition("/")
            if part == "train" and "/" not in metric:
                total, weights = self._window.get(metric, (0.0, 0.0))
                is_latest = metric in _LATEST
                self._window[metric] = (value, 1.0) if is_latest else (total + value * weight, weights + weight)
                self._newest[metric] = value
            elif part not in ("train", "perf", "progress"):
                evaluated[name] = value
        if update % self._every == 0 and self._window and self._is_due():
            self._print_window(update)
        if evaluated and self._committed is None:
            self.print_evaluation(update, evaluated)

    def _is_due(self) -> bool:
        return self._live is None or perf_counter() - self._line_at >= _LINE_S

    def _print_window(self, update: int) -> None:
        cells = self._cells({name: total / weight for name, (total, weight) in self._window.items()})
        self._window.clear()
        self._line_at = perf_counter()
        if self._live is not None:
            cells.append(per_second(self._rate))
        else:
            cells.append(f"{self._rate:.3g} updates/s")
            done = self._written - self._first
            if self._updates is not None and done:
                left_s = (self._updates - update) * (perf_counter() - self._first_at) / done
                cells.append(f"{clock(left_s)} left")
        self._print(update, cells)

    def _progress(self) -> Progress:
        update = self._written if self._committed is None else self._committed()
        newest = dict(self._newest)  # another thread writes to it
        loss = {"loss": newest.pop("loss")} if "loss" in newest else {}
        values = [f"{name} {value:.4g}" for name, value in {**loss, **newest}.items()]
        return Progress(update, self._updates, values)

    def _cells(self, metrics: Mapping[str, float]) -> list[str]:
        cells: list[str] = []
        for name, value in metrics.items():
            text = f"{value:.4g}"
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            cells.append(f"{name} {text:<{self._widths[name]}}")
        return cells

    def _print(self, update: int, cells: Sequence[str]) -> None:
        if self._updates is None:
            place = f"update {update}"
        else:
            place = f"update {update}/{self._updates}".ljust(len(f"update {self._updates}/{self._updates}"))
        if self._live is None:
            print("  ".join([place, *cells]).rstrip(), file=self._stream or sys.stdout, flush=True)
        else:
            for line in _lines(place, cells, self._live.width):
                self._live.print(line)


def _lines(place: str, cells: Sequence[str], width: int | None) -> list[str]:
    """The cells behind `place`, in as many lines of `width` as they need."""
    lines = [place]
    for cell in cells:
        if width is not None and len(lines[-1]) + 2 + len(cell.rstrip()) > width and lines[-1].strip():
            lines.append(" " * len(place))
        lines[-1] += f"  {cell}"
    return [line.rstrip() for line in lines]
