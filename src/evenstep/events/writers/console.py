"""The metrics on the screen: a line every few updates, and on a terminal or in a notebook a live line under them.

Training metrics are averaged over the updates since the last line, learning rates are the latest; the values of an
evaluation are shown whenever they come. Training metrics of three parts and those of the timer are left to the files.
Over a live line there is at most one line a second, of all updates since the one before.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TextIO, final

from evenstep.events.event import Event, TrainBegin, TrainEnd
from evenstep.events.series import Record
from evenstep.events.writers.live import Live, LiveLine, Pace, live_on
from evenstep.events.writers.writer import Writer

_LATEST = ("train/lr", "train/loss_scale")
_LINE_S = 1.0  # the least time between two lines over a live one


@final
class ConsoleWriter(Writer):
    """Prints metrics.

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
        self._every = every_updates
        self._stream = stream
        self._window: dict[str, tuple[float, float]] = {}
        self._updates: int | None = None
        self._live: Live | None = None
        self._committed: Callable[[], int] | None = None
        self._begin(0)

    @property
    def target(self) -> str:
        return "the screen"

    def follow(self, committed: Callable[[], int]) -> None:
        """Let a live line count by `committed`, from a thread, instead of by what has been written."""
        self._committed = committed

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._updates = None
        self._begin(update)
        self._live = live_on(self._stream or sys.stdout, self._shown)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, TrainBegin):
            self._updates = event.updates
            if self._live is not None:
                self._live.draw()
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
        self._loss = "loss -"
        self._line_at = -_LINE_S
        self._pace = Pace()

    def _one(self, update: int, records: Iterable[Record]) -> None:
        evaluated: list[str] = []
        for _, name, value, weight in records:
            part, _, rest = name.partition("/")
            if part in ("perf", "progress") or (part == "train" and "/" in rest):
                continue
            if part != "train":
                evaluated.append(f"{name} {value:.4g}")
                continue
            total, weights = self._window.get(rest, (0.0, 0.0))
            self._window[rest] = (value, 1.0) if name in _LATEST else (total + value * weight, weights + weight)
        if update % self._every == 0 and self._window and self._is_due():
            self._line(update)
        if evaluated:
            self._print(f"{self._place(update)}  {'  '.join(evaluated)}")

    def _line(self, update: int) -> None:
        values = self._values()
        self._window.clear()
        self._line_at = perf_counter()
        values.append(f"{self._rate:.3g} updates/s" if self._live is None else f"{self._rate:.3g}/s")  # 80 columns
        done = self._written - self._first
        if self._updates is not None and done and self._live is None:  # which says it itself
            left_s = (self._updates - update) * (perf_counter() - self._first_at) / done
            values.append(f"{_clock(left_s)} left")
        self._print("  ".join([self._place(update), *values]))

    def _values(self) -> list[str]:
        return [f"{name} {total / weight:.4g}" for name, (total, weight) in self._window.items()]

    def _is_due(self) -> bool:
        if self._live is None:
            return True
        self._loss = next((value for value in self._values() if value.startswith("loss ")), "")
        return perf_counter() - self._line_at >= _LINE_S

    def _shown(self) -> LiveLine:
        now, update = perf_counter(), self._written if self._committed is None else self._committed()
        self._pace.see(update, now)
        rate = self._pace.rate
        left_s = None if self._updates is None else self._pace.left_s(self._updates, now)
        return LiveLine(
            update=update,
            updates=self._updates,
            loss=self._loss,
            rate=f"{rate:.3g}/s" if rate >= 0.1 or not rate else f"{1 / rate:.3g} s each",
            left="" if left_s is None else f"{_clock(left_s)} left",
        )

    def _place(self, update: int) -> str:
        return f"update {update}" if self._updates is None else f"update {update}/{self._updates}"

    def _print(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._stream or sys.stdout, flush=True)
        else:
            self._live.print(line)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
