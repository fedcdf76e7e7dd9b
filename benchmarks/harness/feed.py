"""Ready-made batches in memory, with a border after every chunk, at which the clock is read and control handed over.

A contender iterates over its feed as over any data, in a thread of its own. When it asks for the first batch of the
next chunk it is stopped, with the time that the chunk took, until it is told to go on. So contenders whose loops
cannot be stepped from outside still take turns, and what they do before the first batch is not counted. It does not
know who iterates.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from threading import Semaphore
from typing import Any


class Feed:
    """One pass over chunks of batches.

    A contender that reads one batch ahead is stopped one batch earlier each time, which leaves the length of its
    chunks as it is.

    Args:
        batches: given in turn, again and again.
        sizes: the number of batches in each chunk.
    """

    def __init__(self, batches: Sequence[Any], sizes: Sequence[int]) -> None:
        self.batches = list(batches)
        self.num_batches = sum(sizes)
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._sizes = tuple(sizes)
        self._go = Semaphore(0)
        self._stopped = Semaphore(0)
        self._began: tuple[float, float] | None = None
        self._over = False

    def recast(self, form: Callable[[Any], Any]) -> None:
        """Put the batches in the form that a contender takes, before anything is timed."""
        self.batches = [form(batch) for batch in self.batches]

    def __iter__(self) -> Iterator[Any]:
        batches = cycle(self.batches)
        for size in self._sizes:
            if not self._over:
                self._border()
            if self._over:
                return
            yield from islice(batches, size)

    def _border(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._began is not None:
            self.wall_s.append(wall - self._began[0])
            self.cpu_s.append(cpu - self._began[1])
        self._stopped.release()
        self._go.acquire()
        self._began = time.perf_counter(), time.process_time()

    def advance(self) -> None:
        """Let the contender run until its next border, or its end."""
        self._go.release()
        self.wait()

    def wait(self) -> None:
        """Wait until the contender is at a border, or at its end."""
        self._stopped.acquire()

    def end(self) -> None:
        """Say that the contender has returned; called in its thread."""
        self._stopped.release()

    def abandon(self) -> None:
        """Make this the end of the data, and let the contender run into it."""
        self._over = True
        self._go.release()
