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


_DRAWING = threading.RLock()  # held by the thread that draws from these generators


@contextmanager
def drawing_alone(method: str) -> Generator[None]:
    """Refuse other threads of this process inside the `with`."""
    if not _DRAWING.acquire(blocking=False):
        raise ArgumentError(
            f"`{method}` was called while another thread of this process trains, and both draw from torch's, numpy's "
            f"and Python's global generators. Let one wait for the other, or give each a process.",
            field=method,
        )
    try:
        yield
    finally:
        _DRAWING.release()


def generator_states() -> tuple[object, ...]:
    """States of the global generators of torch, numpy and Python, to be compared."""
    _, words, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), place, random.getstate()


@contextmanager
def undisturbed(device: torch.device | None = None) -> Generator[None]:
    """Restore the global generators at the end of the `with`, also that of a CUDA device."""
    devices = [device] if device is not None and device.type == "cuda" else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
