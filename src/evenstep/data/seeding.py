"""Seeds the global generators of torch, numpy and Python from a key.

Seeding before each sample makes its augmentation a function of (seed, epoch, sample) alone.
"""

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

from evenstep.errors import ArgumentError


def seed_generators(number: int) -> None:
    """Seed all three from one 64-bit number, numpy from other bits than torch: both are Mersenne twisters."""
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)
    np.random.seed(number >> 32)
    random.seed(number)


_THREADS: list[int] = []  # those in which something draws from these generators, as often as it has begun to
_CHANGING = threading.Lock()


@contextmanager
def drawing_alone(method: str) -> Generator[None]:
    """Refuse other threads of this process inside the `with`."""
    mine = threading.get_ident()
    with _CHANGING:
        if any(one != mine for one in _THREADS):
            raise ArgumentError(
                f"`{method}` was called while another thread of this process trains, and both draw from torch's, "
                f"numpy's and Python's global generators. Let one wait for the other, or give each a process.",
                field=method,
            )
        _THREADS.append(mine)
    try:
        yield
    finally:
        _THREADS.remove(mine)


def generator_states() -> tuple[object, ...]:
    """States of the global generators of torch, numpy and Python, to be compared."""
    _, words, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), place, random.getstate()


@contextmanager
def undisturbed(device: torch.device | None = None) -> Generator[None]:
    """Restore the global generators of Python, numpy and torch at the end of the `with`.

    Args:
        device: whose generator is given back as well, if it is a CUDA device.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
