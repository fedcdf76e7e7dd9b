"""Answers requests in this process, or ahead of time in worker processes.

The workers are one torch `DataLoader` over an endless sequence of requests, so prefetching crosses ends of epochs.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from errno import EMFILE
from itertools import islice
from math import ceil
from pickle import PicklingError
from types import FrameType
from typing import Any, cast, final
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from evenstep.data.fetch import Fetcher, Reading, Reply, Request, Seeding
from evenstep.data.seeding import undisturbed
from evenstep.errors import DataError, clause
from evenstep.internals import end_workers, workers_of
from evenstep.process import REQUEUE

_LONGEST_WAIT_S = 2e6  # 23 days: a queue takes its milliseconds in 31 bits
_OUTLIVED = (*REQUEUE, signal.SIGINT)


@final
class Here:
    """Answers in this process, when asked, leaving its random generators as they were."""

    def __init__(self, fetcher: Fetcher, *, pin_memory: bool) -> None:
        self._fetcher = fetcher
        self._pins = pin_memory
        self._requests: Iterator[Request] = iter(())

    def start(self, requests: Iterator[Request]) -> None:
        self._requests = requests

    def take(self, count: int) -> list[Reply]:
        """Fetch the replies to the next `count` requests."""
        requests = islice(self._requests, count)
        with nullcontext() if self._fetcher.seeding is Seeding.NEVER else undisturbed():
            replies = [self._fetcher[request] for request in requests]
        return [reply.pin_memory() for reply in replies] if self._pins else replies


class _Requests:
    def __init__(self) -> None:
        self.source: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.source


def _as_it_is(reply: Reply) -> Reply:
    return reply


@final
class Workers:
    """Processes that answer requests ahead of time."""

    def __init__(
        self, fetcher: Fetcher, *, num_workers: int, prefetch: int, timeout_s: float, pin_memory: bool
    ) -> None:
        self.pins = pin_memory
        self.lost = False
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._requests = _Requests()
        self._loader: DataLoader[Reply] | None = DataLoader(
            fetcher,
            batch_size=None,
            sampler=cast(Any, self._requests),
            num_workers=num_workers,
            collate_fn=cast(Any, _as_it_is),
            pin_memory=pin_memory,
            timeout=min(timeout_s, _LONGEST_WAIT_S),
            # Of its own, or the loader would draw its first number from the user's generator.
            generator=torch.Generator(),
            prefetch_factor=prefetch,
            persistent_workers=True,
            worker_init_fn=_outlive_signals,
        )
        self._replies: Iterator[Reply] | None = None
        self._num_taken = 0

    def start(self, requests: Iterator[Request]) -> None:
        """Answer `requests` from now on, in their order; replies due to earlier ones are thrown away.

        The first requests are sent to the processes, which are started if they are not running.
        """
        assert self._loader is not None
        _end_at_exit(self)
        self._requests.source = requests
        self._num_taken = 0
        try:
            with _signals_wait() if self._replies is None else nullcontext(), _sigchld_kept():
                self._replies = iter(self._loader)
        except (TypeError, AttributeError, PicklingError) as error:
            self.lost = True
            raise DataError(
                f"the data workers could not be started: {clause(str(error))}. Dataset and collate are pickled "
                "for them: define both at the top of a module, without lambdas or open files."
            ) from error
        except (RuntimeError, OSError, EOFError) as error:
            raise self._loss(error, "their first micro-batches") from error

    def take(self, count: int) -> list[Reply]:
        """Wait for the replies to the next `count` requests."""
        return [self._take_one() for _ in range(count)]

    def close(self) -> None:
        """End the processes."""
        replies, self._replies, self._loader = self._replies, None, None
        workers = workers_of(replies)
        with _sigchld_kept(meanwhile=signal.SIG_DFL):
            if self.lost:
                for worker in workers:
                    worker.kill()  # one that hangs would not hear a request to end, for which torch waits 5 s
            end_workers(replies)
            for worker in workers:
                if worker.is_alive():  # it hangs, and does not end at torch's SIGTERM
                    worker.kill()
                    worker.join()

    def _take_one(self) -> Reply:
        if self._replies is None:
            raise DataError("the data were closed while they were read; call `batches` again to go on.")
        try:
            for worker in workers_of(self._replies):
                if not worker.is_alive():
                    raise RuntimeError(f"data worker {worker.pid} has ended with exit code {worker.exitcode}.")
            reply = next(self._replies)
        except (RuntimeError, OSError, EOFError) as error:
            # The loader gives requests to its workers in turn.
            worker = self._num_taken % self._num_workers
            raise self._loss(error, f"a micro-batch, the task of worker {worker}") from error
        self._num_taken += 1
        return reply

    def _loss(self, error: Exception, waiting_for: str) -> DataError:
        self.lost = True
        why = clause(str(error) or type(error).__name__)
        what = f"the {self._num_workers} data workers did not deliver {waiting_for}: {why}"
        if isinstance(error, OSError) and error.errno == EMFILE:
            return DataError(f"{what}. Raise the limit, `ulimit -n 65536`, or use fewer workers.")
        return DataError(
            f"{what}. A killed worker has mostly run out of memory: use fewer workers. One that hangs shows why with "
            f"`num_workers=0`; if fetching may take longer than {self._timeout_s:g} s, raise `timeout_s`."
        )


@final
class Pool:
    """Keeps the workers of one dataset alive between uses, so that frequent evaluations start no processes.

    A reader holds its workers alone; a second reader at the same time gets its own.
    """

    def __init__(self, new_fetcher: Callable[[], Fetcher], *, num_workers: int, reading: Reading) -> None:
        self._new_fetcher = new_fetcher
        self._num_workers = num_workers
        self._reading = reading
        self._idle: Workers | None = None
        self._used: set[Workers] = set()

    @contextmanager
    def loader(self, *, microbatches_per_batch: int, pin_memory: bool) -> Generator[Here | Workers]:
        """A loader for the length of the block."""
        if self._num_workers == 0:
            yield Here(self._new_fetcher(), pin_memory=pin_memory)
            return
        workers = self._take(microbatches_per_batch, pin_memory=pin_memory)
        self._used.add(workers)
        try:
            yield workers
        finally:
            # Lost workers wait for `close`: ending one that hangs takes seconds, and the error should not.
            if workers in self._used and not workers.lost:
                self._used.discard(workers)
                if self._idle is None:
                    self._idle = workers
                else:
                    workers.close()

    def close(self) -> None:
        """End all processes, also those in use."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        while self._used:
            self._used.pop().close()

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
        )


_OPEN: "WeakSet[Workers]" = WeakSet()
_watching: set[int] = set()  # the process that ends the open workers; one that was forked from it has none


def _end_at_exit(workers: Workers) -> None:
    # At exit Python would send a signal that workers ignore, and wait for them.
    if os.getpid() not in _watching:
        _OPEN.clear()
        _watching.clear()
        _watching.add(os.getpid())
        atexit.register(_end_all, os.getpid())
    _OPEN.add(workers)


def _end_all(process: int) -> None:
    if os.getpid() == process:
        for workers in list(_OPEN):
            workers.close()


@contextmanager
def _signals_wait() -> Generator[None]:
    # A starting worker has not yet installed its handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _sigchld_kept(meanwhile: signal.Handlers | None = None) -> Generator[None]:
    # torch's SIGCHLD handler raises anywhere, also halfway through an optimizer step.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if meanwhile is not None:
            signal.signal(signal.SIGCHLD, meanwhile)
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _outlive_signals(_worker: int) -> None:
    # A signal to the whole process group must stop the run only: it may need data before it stops.
    for number in _OUTLIVED:
        signal.signal(number, _stay)  # not SIG_IGN, which programs that a dataset starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)


def _stay(_number: int, _frame: FrameType | None) -> None: ...
