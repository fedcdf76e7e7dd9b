"""Two ways to have requests answered: here, when asked, or by worker processes, ahead of time.

The workers are one torch `DataLoader` over requests without end: the requests cross the ends of epochs, so
prefetching does too, and a new run of requests goes to the same processes. What the requests are is not known here.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pickle import PicklingError
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader

from evenstep.data.fetch import Fetcher, Reply, Request, Seeding
from evenstep.data.seeding import undisturbed
from evenstep.errors import DataError

__all__ = ["Here", "Loader", "Workers"]


class Loader(ABC):
    """Answers requests in their order."""

    @abstractmethod
    def start(self, requests: Iterator[Request]) -> None:
        """Begin to answer `requests`; what was due to earlier ones is thrown away."""

    @abstractmethod
    def take(self, count: int) -> list[Reply]:
        """The replies to the next `count` requests."""


@final
class Here(Loader):
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
        """Nothing is fetched before it is asked for."""
        self._requests = requests

    def take(self, count: int) -> list[Reply]:
        """Fetch them now."""
        requests = islice(self._requests, count)
        if self._fetcher.seeding is Seeding.NEVER:
            replies = [self._fetcher[request] for request in requests]
        else:
            with undisturbed():
                replies = [self._fetcher[request] for request in requests]
        return [reply.pin_memory() for reply in replies] if self._pins else replies


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
class Workers(Loader):
    """Processes that answer requests ahead of time.

    Args:
        fetcher: copied into each process.
        num_workers: how many processes, at least 1.
        prefetch: micro-batches that each fetches ahead, at least 1.
        timeout_s: longest wait for a reply, in seconds.
        pin_memory: whether replies are put in pinned memory.
    """

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
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=cast(Any, _as_it_is),
            pin_memory=pin_memory,
            timeout=timeout_s,
            # Of its own, or the loader would draw its first number from the user's generator.
            generator=torch.Generator(),
            prefetch_factor=prefetch,
            persistent_workers=True,
        )
        self._replies: Iterator[Reply] | None = None
        self._num_taken = 0

    def start(self, requests: Iterator[Request]) -> None:
        """Send the first requests to the processes, which are started if they are not running.

        Raises:
            DataError: the processes cannot be started, or no longer answer.
        """
        assert self._loader is not None
        self._requests.source = requests
        self._num_taken = 0
        try:
            self._replies = iter(self._loader)
        except (TypeError, AttributeError, PicklingError) as error:
            self.lost = True
            raise DataError(
                f"the data workers could not be started: {error}. They get the dataset and the collate function by "
                "pickling: define both at the top of a module, without lambdas or open files, or set "
                "`num_workers` to 0."
            ) from error
        except (RuntimeError, OSError, EOFError) as error:
            raise self._loss(error, "what they had begun") from error

    def take(self, count: int) -> list[Reply]:
        """Wait for them.

        Raises:
            DataError: a worker died, or did not answer in time.
        """
        return [self._take_one() for _ in range(count)]

    def close(self) -> None:
        """End the processes."""
        replies, self._replies, self._loader = self._replies, None, None
        # torch ends persistent workers when the garbage collector finds the iterator, which a traceback can delay
        # without bound; this is the method that it calls then.
        shutdown = getattr(replies, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _take_one(self) -> Reply:
        if self._replies is None:
            raise DataError("the data were closed while they were read; call `batches` again to go on.")
        try:
            reply = next(self._replies)
        except (RuntimeError, OSError, EOFError) as error:
            # The loader hands requests to its workers in turn, so the number of the request tells whose it is.
            worker = self._num_taken % self._num_workers
            raise self._loss(error, f"{self._requests.unanswered[0]}, the task of worker {worker}") from error
        self._num_taken += 1
        self._requests.unanswered.popleft()
        return reply

    def _loss(self, error: Exception, waiting_for: str) -> DataError:
        self.lost = True
        return DataError(
            f"the {self._num_workers} data workers did not deliver {waiting_for}: {error}. A worker that is killed "
            "has mostly run out of memory: use fewer workers or smaller micro-batches. One that hangs waits for a "
            "file, a lock or the network, or made a batch that cannot be pickled: look at the dataset with "
            f"`num_workers=0`. If fetching may take longer than {self._timeout_s:g} s, raise `timeout_s`."
        )
