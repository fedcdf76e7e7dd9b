"""The generators that dataset code draws from (torch's, numpy's legacy one, Python's), seeded from a key.

Seeding before each sample makes its augmentation a function of (seed, epoch, sample) alone. It is not the
randomness of the model, which the update seeds.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["seed_generators", "undisturbed"]


def seed_generators(number: int) -> None:
    """Seed all three from one 64-bit number, numpy from other bits than torch: both are Mersenne twisters.

    >>> with undisturbed():
    ...     seed_generators(2**40 + 1)
    ...     first = random.random()
    ...     seed_generators(2**40 + 1)
    ...     first == random.random()
    True
    """
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)
    np.random.seed(number >> 32)
    random.seed(number)


@contextmanager
def undisturbed() -> Generator[None]:
    """Put all three generators back, at the end of the block, to where they were at its beginning."""
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
