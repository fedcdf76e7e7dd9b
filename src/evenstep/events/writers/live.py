"""A line that shows how far a run is, drawn again and again: at the bottom of a terminal, or in a notebook's cell.

A thread draws it, twice a second, from numbers that it reads itself; so it moves while an update takes long, and an
update waits for nothing. It does not know what the numbers mean.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO, final

from evenstep.events.screens import notebook_of, screen_of

TICK_S = 0.5
_PACE_S, _PACE_MARKS = 60.0, 3  # the rate is that of the last minute, or of so many updates if those take longer
_DRAWING = threading.RLock()
_guarded: list[bool] = []


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLine:
    """What a live line shows.

    Args:
        updates: planned ones; None if that is not known.
        loss: in words, "" if there is none yet.
        rate: updates per second, in words.
        left: time left, in words; "" if that is not known.
    """

    update: int
    updates: int | None
    loss: str = ""
    rate: str = ""
    left: str = ""

    @property
    def count(self) -> str:
        """`3/10`, or `3` where there is no end."""
        return f"{self.update}" if self.updates is None else f"{self.update}/{self.updates}"


@final
@dataclass(slots=True)
class Pace:
    """How fast updates come, from when they were seen.

    >>> pace = Pace()
    >>> for now, update in ((0.0, 0), (2.0, 1), (4.0, 2)):
    ...     pace.see(update, now)
    >>> pace.rate, pace.left_s(10, 5.0)
    (0.5, 15.0)
    """

    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]]())

    def see(self, update: int, now: float) -> None:
        """Note that `update` updates are done at `now`, in seconds."""
        marks = self._marks
        if marks and update < marks[-1][1]:
            marks.clear()  # the run went back
        if not marks or update > marks[-1][1]:
            marks.append((now, update))
        while len(marks) > _PACE_MARKS and now - marks[1][0] > _PACE_S:
            marks.popleft()

    @property
    def rate(self) -> float:
        """Updates per second; 0 while that is not known."""
        if len(self._marks) < 2:
            return 0.0
        (began, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_at - began, 1e-9)

    def left_s(self, updates: int, now: float) -> float | None:
        """Seconds until `updates` are done; None while that is not known."""
        if not self.rate:
            return None
        last_at, last = self._marks[-1]
        return max((updates - last) / self.rate - (now - last_at), 0.0)


class Live(ABC):
    """A live line.

    Args:
        shown: gives what to show now; called from a thread.
    """

    def __init__(self, shown: Callable[[], LiveLine]) -> None:
        self._shown = shown
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-live-line", daemon=True)
        _guard_forks()
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.draw()

    def draw(self) -> None:
        """Draw it now."""
        with _DRAWING:
            if not self._ended.is_set():
                self._draw(self._shown())

    def print(self, line: str) -> None:
        """Show a line that stays."""
        with _DRAWING:
            self._print(line)

    def close(self) -> None:
        """Take the line away."""
        with _DRAWING:
            if self._ended.is_set():
                return
            self._ended.set()
            self._close()
        self._thread.join()

    @abstractmethod
    def _draw(self, shown: LiveLine) -> None: ...
    @abstractmethod
    def _print(self, line: str) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...


def live_on(stream: TextIO, shown: Callable[[], LiveLine]) -> Live | None:
    """A live line on `stream`; None where lines can only follow each other."""
    kind = screen_of(stream)
    if kind == "terminal":
        return _OnTerminal(stream, shown)
    return _InNotebook(notebook_of(stream), shown) if kind == "notebook" else None


@final
class _OnTerminal(Live):
    def __init__(self, stream: TextIO, shown: Callable[[], LiveLine]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        bar = BarColumn(None, table_column=Column(ratio=1, min_width=4))
        texts = [
            TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=Column(no_wrap=True))
            for name in ("count", "loss", "rate", "left")
        ]
        self._progress = Progress(
            bar, *texts, console=Console(file=stream), auto_refresh=False, expand=True, transient=True
        )
        self._task = self._progress.add_task("", total=None, count="", loss="", rate="", left="")
        self._progress.start()
        super().__init__(shown)

    def _draw(self, shown: LiveLine) -> None:
        self._progress.update(
            self._task,
            completed=shown.update,
            total=shown.updates,
            count=shown.count,
            loss=shown.loss,
            rate=shown.rate,
            left=shown.left,
        )
        self._progress.refresh()

    def _print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _close(self) -> None:
        self._progress.stop()


@final
class _InNotebook(Live):
    def __init__(self, display: Any, shown: Callable[[], LiveLine]) -> None:
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        super().__init__(shown)

    def _draw(self, shown: LiveLine) -> None:
        words = (f"update {shown.count}", shown.loss, shown.rate, shown.left)
        self._handle.update({"text/plain": "  ".join(word for word in words if word)}, raw=True)

    def _print(self, line: str) -> None:
        print(line, flush=True)

    def _close(self) -> None:
        self._draw(self._shown())


def _guard_forks() -> None:
    if not _guarded and hasattr(os, "register_at_fork"):
        _guarded.append(True)
        os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)
