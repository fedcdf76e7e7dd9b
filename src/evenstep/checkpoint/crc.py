"""CRC-32 of joined bytes from the CRC-32s of their parts, so that readers of parts can verify a whole together.

With x the bit shifted out, a CRC is a remainder modulo the polynomial P, and that of `a + b` is
`crc(a) · x^(8 · len(b)) + crc(b)` modulo P. It is the method of zlib's `crc32_combine`, which Python does not offer.
"""

from functools import cache

_POLYNOMIAL = 0xEDB88320  # P, the highest power in the lowest bit
_ONE = 1 << 31  # x^0


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one after the other.

    Args:
        first: the checksum of the first run.
        second: that of the second.
        second_bytes: the length of the second.

    >>> from zlib import crc32
    >>> joined_crc32(crc32(b"one"), crc32(b"two!"), 4) == crc32(b"onetwo!")
    True
    """
    return _product(_shift(second_bytes), first) ^ second


@cache
def _shift(num_bytes: int) -> int:
    """x^(8 · num_bytes) modulo P."""
    power, bit = _ONE, 3  # 8 = 2^3
    while num_bytes:
        if num_bytes & 1:
            power = _product(_square(bit % 32), power)
        num_bytes >>= 1
        bit += 1
    return power


@cache
def _square(times: int) -> int:
    """x^(2^times) modulo P."""
    if not times:
        return _ONE >> 1
    root = _square(times - 1)
    return _product(root, root)


def _product(one: int, other: int) -> int:
    """The product of two polynomials modulo P."""
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
