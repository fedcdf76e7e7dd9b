"""Two ways to have requests answered: here, when asked, or by worker processes, ahead of time.

The workers are one torch `DataLoader` over requests without end: the requests cross the ends of epochs, so
prefetching does too, and a new run of requests goes to the same processes. Workers that die or hang are started anew,
with the requests that they have not answered. What the requests are is not known here.
"""

import atexit
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from errno import EMFILE
from itertools import chain, islice
from multiprocessing import queues
from pickle import PicklingError
from traceback import clear_frames
from types import FrameType
from typing import Any, cast, final
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from evenstep.data.batch import DataFault
from evenstep.data.fetch import Fetcher, Reply, Request, Seeding, unsent
from evenstep.data.seeding import undisturbed
from evenstep.errors import DataError, clause
from evenstep.internals import end_workers, workers_of
from evenstep.signals import REQUEUE


@final
class Here:
    """Answers in this process, when asked, leaving its random generators as they were.

    Args:
        fetcher: reads the samples.
        pin_memory: whether replies are put in pinned memory.
    """

    def __init__(self, fetcher: Fetcher, *, pin_memory: bool) -> None:
        self._fetcher = fetcher
        self._pins = pin_memory
        self._requests: Iterator[Request] = iter(())

    def start(self, requests: Iterator[Request]) -> None:
        """Answer `requests` from now on, in their order; nothing is fetched before it is asked for."""
        self._requests = requests

    def take(self, count: int) -> list[Reply]:
        """Fetch the replies to the next `count` requests."""
        requests = islice(self._requests, count)
        if self._fetcher.seeding is Seeding.NEVER:
            replies = [self._fetcher[request] for request in requests]
        else:
            with undisturbed():
                replies = [self._fetcher[request] for request in requests]
        return [reply.pin_memory() for reply in replies] if self._pins else replies

    def take_faults(self) -> list[DataFault]:
        """None: there are no workers that could be lost."""
        return []


_LONGEST_WAIT_S = 2e6  # 23 days: a queue is told its milliseconds in 31 bits


class _Requests:
    """A sampler that gives, each time it is iterated, the requests it was last told, and knows those not answered."""

    def __init__(self) -> None:
        self.source: Iterator[Request] = iter(())
        self.unanswered: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        self.unanswered.clear()
        for request in self.source:
            self.unanswered.append(request)
            yield request


def _as_it_is(reply: Reply) -> Reply:
    return reply


@final
class Workers:
    """Processes that answer requests ahead of time.

    Args:
        fetcher: copied into each process.
        num_workers: how many processes, at least 1.
        prefetch: micro-batches that each fetches ahead, at least 1.
        timeout_s: longest wait for a reply, in seconds.
        pin_memory: whether replies are put in pinned memory.
        restarts: how many times in a row, without an answer in between, they may be started anew.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        num_workers: int,
        prefetch: int,
        timeout_s: float,
        pin_memory: bool,
        restarts: int = 0,
    ) -> None:
        self.pins = pin_memory
        self.lost = False
        self._fetcher = fetcher
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._restarts = restarts
        self._restarted = 0
        self._faults: list[DataFault] = []
        self._requests = _Requests()
        self._loader: DataLoader[Reply] | None = self._new_loader()
        self._replies: Iterator[Reply] | None = None
        self._num_taken = 0

    def _new_loader(self) -> DataLoader[Reply]:
        return DataLoader(
            self._fetcher,
            batch_size=None,
            sampler=self._requests,
            num_workers=self._num_workers,
            collate_fn=cast(Any, _as_it_is),
            pin_memory=self.pins,
            timeout=min(self._timeout_s, _LONGEST_WAIT_S),
            # Of its own, or the loader would draw its first number from the user's generator.
            generator=torch.Generator(),
            prefetch_factor=self._prefetch,
            persistent_workers=True,
            worker_init_fn=_begin,
        )

    def start(self, requests: Iterator[Request]) -> None:
        """Answer `requests` from now on, in their order; what was due to earlier ones is thrown away.

        The first of them are sent to the processes, which are started if they are not running.

        Raises:
            DataError: the processes cannot be started, or no longer answer.
        """
        assert self._loader is not None
        _end_at_exit(self)
        self._requests.source = requests
        self._num_taken = 0
        try:
            with _deaths_are_heard(), _signals_wait() if self._replies is None else nullcontext():
                self._replies = iter(self._loader)
        except (TypeError, AttributeError, PicklingError) as error:
            self.lost = True
            raise DataError(
                f"the data workers could not be started: {clause(str(error))}. They get the "
                "dataset and the collate function by pickling: define both at the top of a module, without lambdas or "
                "open files, or set `num_workers` to 0."
            ) from error
        except (RuntimeError, OSError, EOFError) as error:
            raise self._loss(error, "what they had begun") from error
        _hear_deaths_only_while_waiting()

    def take(self, count: int) -> list[Reply]:
        """Wait for the replies to the next `count` requests.

        Raises:
            DataError: a worker died, or did not answer in time.
        """
        return [self._take_one() for _ in range(count)]

    def close(self) -> None:
        """End the processes."""
        replies, self._replies, self._loader = self._replies, None, None
        workers = workers_of(replies)
        if self.lost:
            for worker in workers:
                worker.kill()  # one that hangs would not hear a request to end, for which torch waits 5 s
        end_workers(replies)
        for worker in workers:
            if worker.is_alive():  # it hangs, and does not end at torch's SIGTERM
                worker.kill()
                worker.join()

    def _take_one(self) -> Reply:
        while True:
            try:
                reply = self._next()
            except (RuntimeError, OSError, EOFError) as error:
                # The loader hands requests to its workers in turn, so the number of the request tells whose it is.
                worker = self._num_taken % self._num_workers
                loss = self._loss(error, f"{self._requests.unanswered[0]}, the task of worker {worker}")
                if self._restarted >= self._restarts:
                    raise loss from error
                _let_go(error)
            else:
                self._restarted = 0
                self._num_taken += 1
                self._requests.unanswered.popleft()
                return reply
            self._start_anew(loss)

    def _next(self) -> Reply:
        """Wait for the next reply of a worker."""
        if self._replies is None:
            raise DataError("the data were closed while they were read; call `batches` again to go on.")
        with _deaths_are_heard():
            for worker in workers_of(self._replies):
                if not worker.is_alive():  # it ended while nobody waited for it
                    raise RuntimeError(f"data worker {worker.pid} has ended with exit code {worker.exitcode}.")
            return next(self._replies)

    def take_faults(self) -> list[DataFault]:
        """What went wrong with the processes since this was last asked, and was mended."""
        faults, self._faults = self._faults, []
        return faults

    def _start_anew(self, loss: DataError) -> None:
        """End all workers, whatever they do, and have others answer what these have not."""
        self._restarted += 1
        self._faults.append(DataFault(message=f"{loss} They were started anew, at the same place."))
        requests = chain(list(self._requests.unanswered), self._requests.source)
        self.close()
        self._loader = self._new_loader()
        self.lost = False
        self.start(requests)

    def _loss(self, error: Exception, waiting_for: str) -> DataError:
        self.lost = True
        why = clause(str(error) or type(error).__name__)
        what = f"the {self._num_workers} data workers did not deliver {waiting_for}: {why}"
        if isinstance(error, OSError) and error.errno == EMFILE:
            return DataError(f"{what}. Raise the limit, `ulimit -n 65536`, or use fewer workers.")
        return DataError(
            f"{what}. A worker "
            "that is killed has mostly run out of memory: use fewer workers or smaller micro-batches. One that hangs "
            "waits for a file, a lock or the network: look at the dataset with `num_workers=0`. "
            f"If fetching may take longer than {self._timeout_s:g} s, raise `timeout_s` "
            "(of a DataLoader its `timeout`)."
        )


def _let_go(error: BaseException | None) -> None:
    """Let go of what the frames hold in which an error was raised, and those before it: torch's, in the midst of taking
    a tensor from a worker, hold the descriptors of the worker's queues and connections.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_OPEN: "WeakSet[Workers]" = WeakSet()
_watching: set[int] = set()  # the process that ends those that are open: one that was forked from it has none


def _end_at_exit(workers: Workers) -> None:
    """End the workers with this process, if nobody has closed them: at its end Python would ask them by a signal that
    they outlive, and wait for them.
    """
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


_OUTLIVED = (*REQUEUE, signal.SIGINT)


@contextmanager
def _signals_wait() -> Generator[None]:
    """Hold signals back while workers are started, who begin so and cannot be ended before they outlive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(_worker: int) -> None:
    """What each worker does first."""
    _outlive_signals()
    _answer_for_unsent()


def _outlive_signals() -> None:
    """Let a signal for all processes of a run end only the run: it may need data before it can stop."""
    for number in _OUTLIVED:
        signal.signal(number, _stay)  # not SIG_IGN, which programs that a dataset starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)


def _answer_for_unsent() -> None:
    """Let an error be the reply to a request whose batch can't be pickled: Python's queues print it and send nothing,
    and it would be waited for until the timeout.
    """
    queue: Any = queues.Queue
    by_default = queue._on_queue_feeder_error

    def told(queue: Any, error: Exception, item: Any) -> None:
        match item:
            case (number, Reply()):
                queue.put((number, unsent(error)))
            case _:
                by_default(error, item)

    queue._on_queue_feeder_error = told


def _stay(_number: int, _frame: FrameType | None) -> None: ...


_waiting = threading.local()


@contextmanager
def _deaths_are_heard() -> Generator[None]:
    """Let the death of a worker be raised inside the `with`."""
    _waiting.now = True
    try:
        yield
    finally:
        _waiting.now = False


def _hear_deaths_only_while_waiting() -> None:
    """Keep torch's SIGCHLD handler, which raises wherever the program is, from doing so in the midst of an update."""
    if threading.current_thread() is not threading.main_thread():
        return  # where torch sets no handler either
    torchs = signal.getsignal(signal.SIGCHLD)
    if not callable(torchs) or isinstance(torchs, _OnlyWhileWaiting):
        return
    signal.signal(signal.SIGCHLD, _OnlyWhileWaiting(torchs))


@final
class _OnlyWhileWaiting:
    """A signal handler that passes on to another only while somebody waits for a worker."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if getattr(_waiting, "now", False):
            self._handler(number, frame)
