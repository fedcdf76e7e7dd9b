"""CRC-32 of a file's bytes, computed beside the reading or writing of the next ones.

Hashing and moving bytes each take a core about as long; done in turn they would double the time of a checkpoint.
zlib and the system calls both let go of Python's lock, so a thread is enough.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, final
from zlib import crc32

AHEAD_PIECES = 4
_WORTH_A_THREAD_BYTES = 1 << 20


@final
class Checksum:
    """The checksum of pieces, in their order; to be used as a context.

    >>> with Checksum() as checksum:
    ...     checksum.add(b"one")
    ...     checksum.add(b"two")
    ...     f"{checksum.value():08x}"
    '8c118145'
    """

    def __init__(self) -> None:
        self._value = 0
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[None]] = deque()

    def add(self, piece: bytes | memoryview) -> None:
        """Take the next piece; it must not change until `AHEAD_PIECES` more are taken, or `value` is."""
        if self._pool is None and len(piece) < _WORTH_A_THREAD_BYTES:
            self._hash(piece)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="evenstep-checksum")
        self._ahead.append(self._pool.submit(self._hash, piece))
        if len(self._ahead) > AHEAD_PIECES:
            self._ahead.popleft().result()

    def value(self) -> int:
        """The checksum of all pieces."""
        while self._ahead:
            self._ahead.popleft().result()
        return self._value

    def _hash(self, piece: bytes | memoryview) -> None:
        self._value = crc32(piece, self._value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
