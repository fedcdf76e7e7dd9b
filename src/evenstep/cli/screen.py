"""Standard output that a run outlives: when whoever reads it has gone, the run goes on unseen.

A run that has trained for days must not end because a pager was closed. Files are not treated so: those errors count.
"""

import io
import os
from typing import TextIO, final


@final
class Screen(io.TextIOBase):
    """Writes to `stream` until its reader goes away, and from then on to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        if self._stream.closed:
            return  # thrown away after its stream: a file object is flushed then, and Python 3.13 says what that raises
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()

    def _let_go(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - typeshed has an attribute
        return self._stream.encoding
