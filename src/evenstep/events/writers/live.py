"""A line that shows the progress of a run, redrawn at the bottom of a terminal.

A thread draws it twice a second, so it moves during long updates, and no update waits for it.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TextIO, TypeAlias, cast, final

Content: TypeAlias = tuple[int, int | None, Sequence[str]]
"""Updates done and planned, and values in the order of their importance."""

TICK_S = 0.5
_PACE_S = 300.0
"""Time over which the rate is averaged."""
_BAR = 12
"""Least width of the bar beside further values."""
_DRAWING = threading.RLock()


@final
class LiveLine:
    """A live line; a thread calls `content` for what to show now."""

    def __init__(self, stream: TextIO, content: Callable[[], Content]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._content = content
        self._bar = Progress(
            BarColumn(None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=Console(file=stream),
            auto_refresh=False,
            speed_estimate_period=_PACE_S,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-live-line", daemon=True)
        _guard_forks()
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.draw()

    def draw(self) -> None:
        with _DRAWING:
            if self._ended.is_set():
                return
            update, updates, values = self._content()
            self._bar.update(self._task, completed=update, total=updates)
            task = self._bar.tasks[0]
            count = f"{update}" if updates is None else f"{update}/{updates}"
            pace = [per_second(task.speed)] if task.speed else []
            if pace and task.time_remaining is not None:
                pace.append(f"{clock(task.time_remaining)} left")
            while len(values) > 1 and len("  ".join([count, *values, *pace])) + _BAR > self.width:
                values = values[:-1]
            text = "  ".join([count, *values, *pace]).rstrip()
            self._bar.update(self._task, description=text, refresh=True)

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._bar.console.width

    def print(self, line: str) -> None:
        """Print a line that stays above the live one."""
        with _DRAWING:
            self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        with _DRAWING:
            self._ended.set()
            self._bar.stop()
        self._thread.join()


def live_on(stream: TextIO | None, content: Callable[[], Content]) -> LiveLine | None:
    """A live line on `stream`; None under CI and without a terminal, where lines can only follow each other."""
    if stream is None or not stream.isatty():  # a program may have no standard output
        return None
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return None if is_ci or is_dumb else LiveLine(stream, content)


def is_watched() -> bool:
    """True if standard output is a terminal or a notebook."""
    stream = cast("TextIO | None", sys.stdout)  # None in a program without standard output
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return stream is not None and (stream.isatty() or hasattr(notebook, "kernel"))


@cache
def _guard_forks() -> None:
    """Fork only while nothing is drawn: a child would inherit the locks of rich."""
    release = _DRAWING.release
    os.register_at_fork(before=_DRAWING.acquire, after_in_parent=release, after_in_child=release)


def per_second(rate: float) -> str:
    """Rate as text: 12.3/s, or 40 s each."""
    return f"{rate:.3g}/s" if rate >= 0.1 or not rate else f"{1 / rate:.3g} s each"


def clock(seconds: float) -> str:
    """Time as text: 0:59, 1:02:03."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
