"""Dummy passes: forwards and backwards of a rank that has fewer micro-batches than others of `fsdp`."""

from collections.abc import Generator
from contextlib import contextmanager

_running = 0  # a plain number, as backwards may run in threads of torch's


def is_dummy_pass() -> bool:
    """True inside a forward or backward that counts nowhere.

    Ranks that share a model in shards (`fsdp`) gather each block together, so a rank with fewer micro-batches than
    others runs dummy passes beside theirs. Their gradients are 0, their changes of buffers are undone, and no loss is
    computed. A forward that collects anything elsewhere, such as tokens per expert in a list, asks this first.

    >>> is_dummy_pass()
    False
    """
    return _running > 0


@contextmanager
def dummy_pass() -> Generator[None]:
    """Inside, `is_dummy_pass` is True."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1
