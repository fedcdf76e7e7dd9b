"""What a stream is to whoever watches: a terminal that can be drawn on, a notebook, or lines of text.

It asks the stream and the environment, and draws nothing.
"""

import os
import sys
from typing import Any, Literal, TextIO

_DUMB = ("dumb", "unknown")


def screen_of(stream: TextIO) -> Literal["terminal", "notebook", "lines"]:
    """How things can be shown on `stream`; "lines" also for terminals without a cursor (TERM=dumb) and under CI.

    >>> import io
    >>> screen_of(io.StringIO())
    'lines'
    """
    if stream.isatty():
        is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        return "lines" if is_ci or os.environ.get("TERM", "").lower() in _DUMB else "terminal"
    return "notebook" if notebook_of(stream) is not None else "lines"


def notebook_of(stream: TextIO) -> Any:
    """IPython's `display`, if `stream` is the output of a notebook's cell; else None."""
    kernel = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if stream is not sys.stdout or getattr(kernel, "kernel", None) is None:
        return None
    from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return display  # pyright: ignore[reportUnknownVariableType]


def is_watched() -> bool:
    """Whether somebody watches standard output: it is a terminal, or a notebook's."""
    return sys.stdout.isatty() or screen_of(sys.stdout) == "notebook"
