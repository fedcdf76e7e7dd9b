"""Output that a command outlives: it continues after a pager or a terminal was closed."""

import errno
import os
from collections.abc import Callable
from typing import Any, TextIO, final


def write_to_nowhere(stream: TextIO) -> None:
    """Discard all further output of `stream`, also what Python flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@final
class Screen:
    """Writes to a stream until its reader has gone, and discards further output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text != "":  # by which Typer only tries if it may write
            self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            write_to_nowhere(self._stream)
            if error.errno not in (errno.EPIPE, errno.EIO):  # a closed pipe, a terminal that hung up
                raise
