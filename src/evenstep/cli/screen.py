"""Output that a run outlives: it continues after a pager or a terminal was closed."""

import errno
import os
import stat
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
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        is_terminal = stat.S_ISCHR(os.fstat(self._stream.fileno()).st_mode)  # `isatty` is False after a hang-up
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and is_terminal):
            raise error
        write_to_nowhere(self._stream)
