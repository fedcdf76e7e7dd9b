"""Which samples, in which order: a pure function of (seed, epoch).

Every index is hashed under the epoch's key and the hashes are sorted, so the order depends on no library's random
stream, on nothing drawn before, and on no layout. It does not cut the order into batches.
"""

import numpy as np
from numpy.typing import NDArray

from evenstep.data.arguments import require_count
from evenstep.keys import key

__all__ = ["order", "scatter"]


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


def order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The order in which `epoch` visits the samples: argsortᵢ mix(key(seed, "order", epoch) xor i).

    Args:
        num_samples: how many there are.
        seed: the run's seed.
        epoch: from 0.
        shuffle: False gives the dataset's own order 0, 1, 2, ….

    Returns:
        A permutation of 0..num_samples-1, `[num_samples]`.

    Raises:
        ArgumentError: a number is negative or not whole.

    >>> order(6, seed=1, epoch=0).tolist()
    [3, 2, 0, 4, 1, 5]
    >>> order(4, seed=1, epoch=0, shuffle=False).tolist()
    [0, 1, 2, 3]
    """
    numbers = np.arange(require_count("num_samples", num_samples, at_least=0), dtype=np.int64)
    if not shuffle:
        return numbers
    epoch_key = key(seed, "order", require_count("epoch", epoch, at_least=0))
    return np.argsort(scatter(epoch_key, numbers), kind="stable").astype(np.int64, copy=False)
