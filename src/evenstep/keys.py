"""Keys for randomness: a pure function from (seed, path) to a 63-bit number.

Everything random in evenstep is seeded from a key instead of drawn from a stream, so it does not depend on what
was drawn before, nor on which process draws it. This is not a cryptographic hash.
"""

from functools import lru_cache
from zlib import crc32

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Scramble a 64-bit number: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, *path: int | str) -> int:
    """The key of a path of numbers and names under `seed`: k ← mix(k xor step) for each step; a number in [0, 2⁶³)."""
    return key_below(branch(seed, *path))


def key_below(state: int, *path: int | str) -> int:
    """The key of a path that begins with the branch `state`: `key_below(branch(7, 3), 5)` is `key(7, 3, 5)`."""
    return (branch_below(state, *path) if path else state) >> 1


def branch(seed: int, *path: int | str) -> int:
    """The beginning of paths, for `key_below`."""
    return branch_below(_root(seed), *path)


def branch_below(state: int, *path: int | str) -> int:
    """The beginning of paths that goes on from the branch `state`."""
    for step in path:
        value = state ^ (crc32(step.encode()) | 1 << 40 if isinstance(step, str) else step & _MASK)
        value = (value + 0x9E3779B97F4A7C15) & _MASK  # `mix`, written out: keys are made in every micro-batch
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        state = value ^ (value >> 31)
    return state


@lru_cache(maxsize=16)
def _root(seed: int) -> int:
    return mix(seed & _MASK)
