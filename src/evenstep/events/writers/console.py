"""A run on the screen: its start and end, metrics every few updates, evaluations, checkpoints, incidents."""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import TextIO, final

from evenstep.events.event import EvaluateEvent, Incident, SaveEvent, TrainEvent
from evenstep.events.hook import Hook
from evenstep.events.metrics.pairs import Record
from evenstep.events.writers.live import Content, LiveLine, clock, live_on, per_second
from evenstep.events.writers.writer import Writer

_LATEST = ("lr", "loss_scale")
"""Training metrics that are not averaged."""
_WIDTH = 6
"""Width of a number, so that columns are aligned."""
_LINE_S = 1.0
"""Least time between two lines above a live one."""


@final
class ConsoleWriter(Writer, Hook):
    """Prints metrics as a writer, and what happens around them as a hook, which a trainer makes of it.

    A line shows training metrics averaged over the updates since the last line, and the newest learning rate. On a
    terminal or in a notebook a live line shows the newest settled values; there is then at most one line a second. The
    values of an evaluation are one line. Metrics of groups and layers, and of speed and memory, are left to the files.

    >>> writer = ConsoleWriter(every_updates=50)
    """

    first_rank_only = True
    draws = False

    def __init__(self, *, every_updates: int = 10, stream: TextIO | None = None) -> None:
        self._every = every_updates
        self._stream = stream
        self._live: LiveLine | None = None
        self._last_incident = ""
        self._updates: int | None = None
        self._begin(0)

    def _begin(self, update: int) -> None:
        self._first = update
        self._written = update
        self._first_at = perf_counter()
        self._evaluation_at = self._first_at
        self._window: dict[str, tuple[float, float]] = {}
        """Sum and weight of training metrics since the last line."""
        self._newest: dict[str, float] = {}
        self._line_at = -_LINE_S

    @property
    def target(self) -> str:
        return "the screen"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._begin(update)
        self._live = live_on(self._stream or sys.stdout, self._content)

    def write(self, records: Sequence[Record]) -> None:
        self._written = max(self._written, *(record.update for record in records), 0)
        for update, group in groupby(records, key=lambda record: record.update):
            for _, name, value, weight in group:
                place, _, metric = name.partition("/")
                if place == "train" and "/" not in metric:
                    total, weights = (0.0, 0.0) if metric in _LATEST else self._window.get(metric, (0.0, 0.0))
                    self._window[metric] = total + value * weight, weights + weight
                    self._newest[metric] = value
            is_due = self._live is None or perf_counter() - self._line_at >= _LINE_S
            if update % self._every == 0 and is_due:
                self._print_window(update)

    def close(self) -> None:
        self._print_window(self._written)
        if self._live is not None:
            self._live.close()
            self._live = None

    def before_train(self, event: TrainEvent) -> None:
        self._updates = event.updates
        parameters = [one for one in self.trainer.model.parameters() if one.requires_grad]
        devices = sorted({str(one.device) for one in parameters})
        until = "until the data ends" if event.updates is None else f"to update {event.updates}"
        where = "" if self.trainer.folder is None else f", in {self.trainer.folder}"
        self._print(
            f"{'resuming' if event.resumed else 'training'} {sum(one.numel() for one in parameters):,} parameters "
            f"on {', '.join(devices) or 'no device'} from update {event.update} {until}{where}"
        )
        if self._live is not None:
            self._live.draw()

    def before_evaluate(self, event: EvaluateEvent) -> None:
        self._evaluation_at = perf_counter()

    def after_evaluate(self, event: EvaluateEvent) -> None:
        if event.metrics:
            spent = _duration(perf_counter() - self._evaluation_at)
            self._print_cells(event.update, [*self._cells(event.metrics), f"in {spent}"])
        else:
            self._print(f"the evaluation of {event.name} failed after update {event.update}")

    def after_save(self, event: SaveEvent) -> None:
        if event.path is None:
            self._print(f"update {event.update} was not saved")
        else:
            self._print(f"saved update {event.update} in {event.path}")

    def on_incident(self, event: Incident) -> None:
        self._last_incident = event.message
        self._print(f"{event.kind} at update {event.update}: {event.message}")

    def after_train(self, event: TrainEvent) -> None:
        self._print_window(self._written)
        reason = event.reason if event.error is None else f"{type(event.error).__name__}: {event.error}"
        is_known = event.error is not None and str(event.error) in self._last_incident
        spent = _duration(perf_counter() - self._first_at)
        updates = "1 update" if event.update == 1 else f"{event.update} updates"
        self._print(f"{event.outcome}, {updates} committed, {spent}{'' if is_known else f': {reason}'}")

    def _print_window(self, update: int) -> None:
        if not self._window:
            return
        cells = self._cells({name: total / weight for name, (total, weight) in self._window.items()})
        self._window.clear()
        self._line_at = perf_counter()
        done = self._written - self._first
        spent_s = perf_counter() - self._first_at
        rate = done / max(spent_s, 1e-9)
        cells.append(per_second(rate) if self._live is not None else f"{rate:.3g} updates/s")
        if self._live is None and self._updates is not None and done:
            cells.append(f"{clock((self._updates - update) / rate)} left")
        self._print_cells(update, cells)

    def _content(self) -> Content:
        update = self._written if self._trainer is None else self.trainer.progress.update
        newest = dict(self._newest)  # another thread writes to it
        return update, self._updates, self._cells(newest)

    def _cells(self, metrics: Mapping[str, float]) -> list[str]:
        ordered = sorted(metrics.items(), key=lambda item: item[0] != "loss")
        return [f"{name} {f'{value:.4g}':<{_WIDTH}}" for name, value in ordered]

    def _print_cells(self, update: int, cells: Sequence[str]) -> None:
        place = f"update {update}"
        if self._updates is not None:
            last = f"update {self._updates}/{self._updates}"
            place = f"{place}/{self._updates}".ljust(len(last))
        width = sys.maxsize if self._live is None else self._live.width
        line = place
        for cell in cells:
            if len(f"{line}  {cell}".rstrip()) > width:
                self._print(line)
                line = " " * len(place)
            line = f"{line}  {cell}"
        self._print(line)

    def _print(self, line: str) -> None:
        if self._live is None:
            print(line.rstrip(), file=self._stream or sys.stdout, flush=True)
        else:
            self._live.print(line.rstrip())


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
