"""A line that shows the progress of a run, redrawn at the bottom of a terminal or in a notebook's cell.

A thread draws it twice a second, so it moves during long updates, and no update waits for it.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TextIO, final

TICK_S = 0.5
_PACE_S = 60.0
"""The rate is that of the last minute, or of three updates if they take longer."""
_BAR = 12
"""Least width of the bar if there is more to show than the loss."""
_DRAWING = threading.RLock()
_has_guard: list[bool] = []


class Progress(NamedTuple):
    """Content of a live line.

    Args:
        update: number of committed updates.
        updates: number of planned updates; None if unknown.
        values: metrics in the order of their importance, such as "loss 1.25".
        pace: rate and time left.
    """

    update: int
    updates: int | None
    values: Sequence[str]
    pace: Sequence[str]

    def text(self, width: int | None = None) -> str:
        """The line without its bar; values that do not fit into `width` are left out.

        >>> Progress(3, 10, ("loss 1.25", "lr 0.1"), ("2/s",)).text(), Progress(3, 10, ("loss 1.25",), ()).text(20)
        ('3/10  loss 1.25  lr 0.1  2/s', '3/10  loss 1.25')
        """
        count = f"{self.update}" if self.updates is None else f"{self.update}/{self.updates}"
        text = "  ".join([count, *self.values[:1], *self.pace])
        for number in range(2, len(self.values) + 1):
            longer = "  ".join([count, *self.values[:number], *self.pace])
            if width is not None and len(longer) + _BAR > width:
                break
            text = longer
        return text


@final
class Pace:
    """Rate of updates and time left, from the times at which updates were seen.

    >>> pace = Pace()
    >>> for now, update in ((0.0, 0), (2.0, 1), (4.0, 2)):
    ...     pace.see(update, now)
    >>> pace.rate, pace.left_s(10, 5.0)
    (0.5, 15.0)
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def see(self, update: int, now: float) -> None:
        """Note that `update` updates are done at `now`, in seconds."""
        marks = self._marks
        if marks and update < marks[-1][1]:
            marks.clear()  # the run went back
        if not marks or update > marks[-1][1]:
            marks.append((now, update))
        while len(marks) > 3 and now - marks[1][0] > _PACE_S:
            marks.popleft()

    @property
    def rate(self) -> float:
        """Updates per second; 0 while unknown."""
        if len(self._marks) < 2:
            return 0.0
        (began, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_at - began, 1e-9)

    def left_s(self, updates: int, now: float) -> float | None:
        """Seconds until `updates` are done; None while unknown."""
        if not self.rate:
            return None
        last_at, last = self._marks[-1]
        return max((updates - last) / self.rate - (now - last_at), 0.0)


class _Screen(Protocol):
    @property
    def width(self) -> int | None: ...
    def draw(self, progress: Progress) -> None: ...
    def print(self, line: str) -> None: ...
    def close(self) -> None: ...


@final
class LiveLine:
    """A live line on a screen.

    Args:
        progress: content to show now; called from a thread.
    """

    def __init__(self, screen: _Screen, progress: Callable[[], Progress]) -> None:
        self._screen = screen
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-live-line", daemon=True)
        _guard_forks()
        self._thread.start()

    @property
    def width(self) -> int | None:
        """Columns of the screen; None if it wraps lines itself."""
        return self._screen.width

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.draw()

    def draw(self) -> None:
        with _DRAWING:
            if not self._ended.is_set():
                self._screen.draw(self._progress())

    def print(self, line: str) -> None:
        """Print a line that stays above the live one."""
        with _DRAWING:
            self._screen.print(line)

    def close(self) -> None:
        """Draw it once more and remove it."""
        with _DRAWING:
            if self._ended.is_set():
                return
            self.draw()
            self._ended.set()
            self._screen.close()
        self._thread.join()


def live_on(stream: TextIO, progress: Callable[[], Progress]) -> LiveLine | None:
    """A live line on `stream`; None where lines can only follow each other."""
    kind = screen_of(stream)
    if kind == "lines":
        return None
    return LiveLine(_Terminal(stream) if kind == "terminal" else _Notebook(_display_of(stream)), progress)


@final
class _Terminal:
    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Bar(
            BarColumn(None, table_column=Column(ratio=1, min_width=4)),
            text,
            console=Console(file=stream),
            auto_refresh=False,
            expand=True,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    @property
    def width(self) -> int | None:
        return self._bar.console.width

    def draw(self, progress: Progress) -> None:
        text = progress.text(self.width)
        self._bar.update(self._task, completed=progress.update, total=progress.updates, description=text, refresh=True)

    def print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


@final
class _Notebook:
    width = None

    def __init__(self, display: Any) -> None:
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self, progress: Progress) -> None:
        self._handle.update({"text/plain": f"update {progress.text()}"}, raw=True)

    def print(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        pass


def _guard_forks() -> None:
    """Fork only while nothing is drawn: a child would inherit the locks of rich."""
    if not _has_guard and hasattr(os, "register_at_fork"):
        _has_guard.append(True)
        os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


def screen_of(stream: TextIO) -> Literal["terminal", "notebook", "lines"]:
    """Kind of the screen behind `stream`; "lines" also under CI and for terminals without a cursor (TERM=dumb).

    >>> import io
    >>> screen_of(io.StringIO())
    'lines'
    """
    if stream.isatty():
        is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        return "lines" if is_ci or os.environ.get("TERM", "").lower() in ("dumb", "unknown") else "terminal"
    return "lines" if _display_of(stream) is None else "notebook"


def _display_of(stream: TextIO) -> Any:
    """IPython's `display`, if `stream` is the output of a notebook's cell; else None."""
    kernel = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if stream is not sys.stdout or getattr(kernel, "kernel", None) is None:
        return None
    from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return display  # pyright: ignore[reportUnknownVariableType]


def is_watched() -> bool:
    """True if standard output is a terminal or a notebook."""
    return sys.stdout.isatty() or screen_of(sys.stdout) == "notebook"
