"""CRC-32 of a file's bytes, computed while the next ones are read or written; and of bytes of which others read parts.

Hashing and moving bytes each take a core about as long; done in turn they would double the time of a checkpoint.
zlib and the system calls both let go of Python's lock, so a thread is enough.

With x the bit shifted out, a CRC is a remainder modulo the polynomial P, and that of `a + b` is
`crc(a) · x^(8 · len(b)) + crc(b)` modulo P. It is the method of zlib's `crc32_combine`, which Python does not offer.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import Self, final
from zlib import crc32

_POLYNOMIAL = 0xEDB88320  # P, the highest power in the lowest bit
_ONE = 1 << 31  # x^0

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


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one after the other, from those of each and the length of the second.

    >>> from zlib import crc32
    >>> joined_crc32(crc32(b"one"), crc32(b"two!"), 4) == crc32(b"onetwo!")
    True
    """
    return _product(_shift(second_bytes), first) ^ second


@cache
def _shift(num_bytes: int) -> int:
    power, bit = _ONE, 3  # 8 = 2^3
    while num_bytes:
        if num_bytes & 1:
            power = _product(_square(bit % 32), power)
        num_bytes >>= 1
        bit += 1
    return power


@cache
def _square(times: int) -> int:
    if not times:
        return _ONE >> 1
    root = _square(times - 1)
    return _product(root, root)


def _product(one: int, other: int) -> int:
    total, bit = 0, _ONE
    while True:
        if one & bit:
            total ^= other
            if not one & (bit - 1):
                return total
        bit >>= 1
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        if not bit:
            return total
