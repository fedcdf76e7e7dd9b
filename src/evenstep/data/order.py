"""Which samples, in which order: a pure function of (seed, epoch).

The order depends on no library's random stream, on nothing drawn before, and on no layout. Up to 2²⁰ samples it is
their hashes' order; of more it is a bijection that is computed a stretch at a time, so that nobody waits for, or holds,
an order of 10⁸ samples. It does not cut the order into batches.
"""

from collections.abc import Callable
from math import isqrt
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from evenstep.data.arguments import require_count
from evenstep.keys import key, mix

__all__ = ["MOST_SORTED", "Enciphered", "Order", "Sorted", "in_order", "order", "order_of", "scatter"]

MOST_SORTED = 2**20  # samples whose order is made as a whole
_ROUNDS = 8
_BLOCK = 2**15  # places whose samples are computed together, in a few ms


def scatter(scatter_key: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash every number under a key: `evenstep.keys.mix(scatter_key ^ n)`, for a whole array at once.

    A bijection for each key: different numbers never collide.

    Args:
        scatter_key: in [0, 2⁶⁴).
        numbers: `[n]`, not negative.

    Reference: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> scatter(0, np.arange(2)).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    value = numbers.astype(np.uint64)
    value ^= np.uint64(scatter_key)
    value += np.uint64(0x9E3779B97F4A7C15)
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


Order: TypeAlias = Callable[[int, int], NDArray[np.int64]]
"""The order in which samples are visited: gives those at the places `start` to `stop - 1`, `[stop - start]`."""


def in_order(start: int, stop: int) -> NDArray[np.int64]:
    """0, 1, 2, …: the dataset's own order."""
    return np.arange(start, stop, dtype=np.int64)


@final
class Sorted:
    """argsortᵢ mix(k xor i): every sample is hashed and the hashes are sorted, when the first stretch is asked for.

    Args:
        num_samples: how many there are; 2²⁰ take a quarter of a second and 8 MB.
        order_key: in [0, 2⁶⁴).
    """

    def __init__(self, num_samples: int, order_key: int) -> None:
        self._num_samples = num_samples
        self._key = order_key
        self._whole: NDArray[np.int64] | None = None

    def __call__(self, start: int, stop: int) -> NDArray[np.int64]:
        if self._whole is None:
            numbers = np.arange(self._num_samples, dtype=np.int64)
            self._whole = np.argsort(scatter(self._key, numbers), kind="stable").astype(np.int64, copy=False)
        return self._whole[start:stop]


@final
class Enciphered:
    """A keyed bijection of 0..n-1, computed for just those places that are asked for, a block at a time.

    A Feistel network over pairs of digits (l, r) with l < a, r < b and a·b a little above n; what falls outside of
    0..n-1 is enciphered again until it falls inside, which is seldom.

    Args:
        num_samples: how many there are.
        order_key: in [0, 2⁶⁴).

    Reference: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: the generalised Feistel cipher
    with cycle walking.

    >>> sorted(Enciphered(10, 7)(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, num_samples: int, order_key: int) -> None:
        self._num_samples = num_samples
        self._keys = [mix(order_key + number) for number in range(_ROUNDS)]
        self._low = isqrt(max(num_samples - 1, 0)) + 1
        self._high = -(-num_samples // self._low)
        self._block = -1
        self._samples = np.empty(0, dtype=np.int64)

    def __call__(self, start: int, stop: int) -> NDArray[np.int64]:
        block = start // _BLOCK
        if stop > (block + 1) * _BLOCK:  # over the border of a block
            return self._at(np.arange(start, stop, dtype=np.int64))
        if block != self._block:
            end = min((block + 1) * _BLOCK, self._num_samples)
            self._samples, self._block = self._at(np.arange(block * _BLOCK, end, dtype=np.int64)), block
        return self._samples[start - block * _BLOCK : stop - block * _BLOCK]

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = self._enciphered(places)
        while (outside := np.flatnonzero(samples >= self._num_samples)).size:
            samples[outside] = self._enciphered(samples[outside])
        return samples

    def _enciphered(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        right, left = np.divmod(numbers, np.int64(self._low))
        for number, round_key in enumerate(self._keys):
            size = self._high if number % 2 else self._low  # of the half that changes
            # 32 bits of the hash, taken to 0..size-1 by multiplying: below 2³² for any dataset
            hashed = (scatter(round_key, right) >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)
            left, right = right, (left + hashed.astype(np.int64)) % size
        return right * self._low + left


def order_of(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> Order:
    """The order in which `epoch` visits the samples, a pure function of (seed, epoch): `Sorted` up to 2²⁰ samples,
    above that `Enciphered`, of which a start costs nothing, however many there are.

    Args:
        num_samples: how many there are.
        shuffle: False gives the dataset's own order 0, 1, 2, ….

    Raises:
        ArgumentError: a number is negative or not whole.

    >>> order_of(10**12, seed=1, epoch=0)(0, 3).tolist()
    [981662940024, 521982624015, 267742323233]
    """
    require_count("num_samples", num_samples, at_least=0)
    if not shuffle:
        return in_order
    order_key = key(seed, "order", require_count("epoch", epoch, at_least=0))
    return Sorted(num_samples, order_key) if num_samples <= MOST_SORTED else Enciphered(num_samples, order_key)


def order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The whole order in which `epoch` visits the samples; see `order_of`.

    Args:
        num_samples, seed, epoch, shuffle: as for `order_of`.

    Returns:
        A permutation of 0..num_samples-1, `[num_samples]`.

    Raises:
        ArgumentError: a number is negative or not whole.

    >>> order(6, seed=1, epoch=0).tolist()
    [3, 2, 0, 4, 1, 5]
    >>> order(4, seed=1, epoch=0, shuffle=False).tolist()
    [0, 1, 2, 3]
    """
    return order_of(num_samples, seed=seed, epoch=epoch, shuffle=shuffle)(0, num_samples)
