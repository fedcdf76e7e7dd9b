"""Output that a run outlives: it must not end because a pager or a terminal was closed."""

import errno
import io
import os
import stat
from typing import TextIO, final


def write_to_nowhere(stream: TextIO) -> None:
    """Have nothing more come of `stream`, also at exit, when Python flushes it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@final
class Screen(io.TextIOBase):
    """Writes to `stream` until its reader goes away, and from then on to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        if self._stream.closed:
            return  # thrown away after its stream: a file object is flushed then, and Python 3.13 says what that raises
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        is_terminal = stat.S_ISCHR(os.fstat(self._stream.fileno()).st_mode)  # `isatty` is False of one that has closed
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and is_terminal):
            raise error
        write_to_nowhere(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - typeshed has an attribute
        return self._stream.encoding
