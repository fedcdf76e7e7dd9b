"""Keeps the workers of one dataset alive between uses, so that evaluating often does not start processes often.

Whoever reads holds its workers alone; a second reader at the same time gets its own. It does not know what is read.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import ceil
from typing import final

from evenstep.data.fetch import Fetcher
from evenstep.data.loader import Here, Workers
from evenstep.data.reading import Reading


@final
class Pool:
    """Lends loaders.

    Args:
        new_fetcher: makes what reads the samples.
        num_workers: processes per loader; 0 for none: reading in this process.
        reading: says how far they read ahead, how long is waited for them, and how often they are started again.
    """

    def __init__(self, new_fetcher: Callable[[], Fetcher], *, num_workers: int, reading: Reading) -> None:
        self._new_fetcher = new_fetcher
        self._num_workers = num_workers
        self._reading = reading
        self._idle: Workers | None = None
        self._lent: set[Workers] = set()

    @contextmanager
    def loader(self, *, microbatches_per_batch: int, pin_memory: bool) -> Generator[Here | Workers]:
        """Lend a loader for the length of the block.

        Args:
            microbatches_per_batch: how many requests a typical global batch makes; may be 0.
            pin_memory: whether replies are put in pinned memory.
        """
        if self._num_workers == 0:
            yield Here(self._new_fetcher(), pin_memory=pin_memory)
            return
        workers = self._take(microbatches_per_batch, pin_memory=pin_memory)
        self._lent.add(workers)
        try:
            yield workers
        finally:
            # Lost workers wait for `close`: ending one that hangs takes seconds, and the error should not.
            if workers in self._lent and not workers.lost:
                self._lent.discard(workers)
                self._keep(workers)

    def close(self) -> None:
        """End all processes, also those that are lent."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        while self._lent:
            self._lent.pop().close()

    def _take(self, microbatches_per_batch: int, *, pin_memory: bool) -> Workers:
        idle, self._idle = self._idle, None
        if idle is not None:
            if idle.pins == pin_memory:
                return idle
            idle.close()
        return Workers(
            self._new_fetcher(),
            num_workers=self._num_workers,
            prefetch=max(1, ceil(self._reading.prefetch_batches * microbatches_per_batch / self._num_workers)),
            timeout_s=self._reading.timeout_s,
            pin_memory=pin_memory,
            restarts=self._reading.retries,
        )

    def _keep(self, workers: Workers) -> None:
        if self._idle is None:
            self._idle = workers
        else:
            workers.close()
