"""A line that shows the progress of a run, redrawn at the bottom of a terminal or in a notebook's cell.

A thread draws it twice a second, so it moves during long updates, and no update waits for it.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO, cast, final

TICK_S = 0.5
_PACE_S = 300.0
"""Time over which the rate is averaged."""
_BAR = 12
"""Least width of the bar beside further values."""
_DRAWING = threading.RLock()
_has_guard: list[bool] = []


class Progress(NamedTuple):
    """Content of a live line: updates done and planned, and metrics in the order of their importance."""

    update: int
    updates: int | None
    values: Sequence[str]

    def text(self, pace: Sequence[str], width: int | None = None) -> str:
        """The line without its bar; further values that do not fit into `width` are left out.

        >>> progress = Progress(3, 10, ("loss 1.25", "lr 0.1"))
        >>> progress.text(["2/s"]), progress.text(["2/s"], 30)
        ('3/10  loss 1.25  lr 0.1  2/s', '3/10  loss 1.25  2/s')
        """
        count = f"{self.update}" if self.updates is None else f"{self.update}/{self.updates}"
        text = "  ".join([count, *self.values[:1], *pace])
        for number in range(2, len(self.values) + 1):
            longer = "  ".join([count, *self.values[:number], *pace])
            if width is not None and len(longer) + _BAR > width:
                break
            text = longer
        return text


@final
class LiveLine:
    """A live line.

    Args:
        display: IPython's `display` for a notebook; None for a terminal.
        progress: content to show now; called from a thread.
    """

    def __init__(self, stream: TextIO, display: Any, progress: Callable[[], Progress]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        self._progress = progress
        self._handle = display and display({"text/plain": ""}, raw=True, display_id=True)
        self._bar = Bar(
            BarColumn(None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=Console(file=stream),
            auto_refresh=False,
            speed_estimate_period=_PACE_S,
            transient=True,
            expand=True,
            disable=display is not None,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-live-line", daemon=True)
        _guard_forks()
        self._thread.start()

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None in a notebook."""
        return self._bar.console.width if self._handle is None else None

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.draw()

    def draw(self) -> None:
        with _DRAWING:
            if self._ended.is_set():
                return
            now = self._progress()
            self._bar.update(self._task, completed=now.update, total=now.updates)
            task = self._bar.tasks[0]
            pace = [] if not task.speed else [per_second(task.speed)]
            if pace and task.time_remaining is not None:
                pace.append(f"{clock(task.time_remaining)} left")
            self._bar.update(self._task, description=now.text(pace, self.width), refresh=True)
            if self._handle is not None:
                self._handle.update({"text/plain": f"update {now.text(pace)}"}, raw=True)

    def print(self, line: str) -> None:
        """Print a line that stays above the live one."""
        with _DRAWING:
            if self._handle is None:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, flush=True)

    def close(self) -> None:
        """Draw it once more; remove it from a terminal."""
        with _DRAWING:
            if self._ended.is_set():
                return
            self.draw()
            self._ended.set()
            self._bar.stop()
        self._thread.join()


def live_on(stream: TextIO | None, progress: Callable[[], Progress]) -> LiveLine | None:
    """A live line on `stream`; None where lines can only follow each other.

    That is also so under CI, and on terminals without a cursor (TERM=dumb).
    """
    if stream is None:  # a program without standard output
        return None
    display = None
    if stream.isatty():
        is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        if is_ci or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
            return None
    else:
        display = _display_of(stream)
        if display is None:
            return None
    return LiveLine(stream, display, progress)


def is_watched() -> bool:
    """True if standard output is a terminal or a notebook."""
    stream = cast("TextIO | None", sys.stdout)  # None in a program without standard output
    return stream is not None and (stream.isatty() or _display_of(stream) is not None)


def _display_of(stream: TextIO) -> Any:
    """IPython's `display`, if `stream` is the output of a notebook's cell; else None."""
    kernel = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if stream is not sys.stdout or getattr(kernel, "kernel", None) is None:
        return None
    from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return display  # pyright: ignore[reportUnknownVariableType]


def _guard_forks() -> None:
    """Fork only while nothing is drawn: a child would inherit the locks of rich."""
    if not _has_guard and hasattr(os, "register_at_fork"):
        _has_guard.append(True)
        os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


def per_second(rate: float) -> str:
    """Rate as text.

    >>> per_second(12.345), per_second(0.025)
    ('12.3/s', '40 s each')
    """
    return f"{rate:.3g}/s" if rate >= 0.1 or not rate else f"{1 / rate:.3g} s each"


def clock(seconds: float) -> str:
    """Time as text.

    >>> clock(59.7), clock(3723)
    ('1:00', '1:02:03')
    """
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
