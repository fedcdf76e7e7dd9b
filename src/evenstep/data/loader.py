"""Reads and collates micro-batches, in this process or ahead of time in worker processes, with the same result.

The workers are one torch `DataLoader` over an endless sequence of requests, so prefetching crosses ends of epochs.
"""

import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from math import ceil
from multiprocessing.util import Finalize
from pickle import PicklingError
from types import FrameType
from typing import Any, Literal, NamedTuple, cast, final
from weakref import WeakValueDictionary

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType] - torch leaves the type of its list open
)

from evenstep.arguments import first_of
from evenstep.data.batch import DataFault
from evenstep.data.dataset import draws_nothing, fetches_many, rows_of, with_set_epoch
from evenstep.data.seeding import seed_generators, undisturbed
from evenstep.data.split import num_arrived
from evenstep.data.tree import pin
from evenstep.errors import DataError, clause
from evenstep.internals import end_workers, workers_of
from evenstep.keys import key, mix
from evenstep.process import REQUEUE
from evenstep.schema import Count, Natural, Positive, option

Collate = Callable[[list[Any]], object]
DEFAULT_COLLATE = cast(Collate, default_collate)

_LONGEST_WAIT_S = 2e6  # 23 days: a queue takes its milliseconds in 31 bits
_OUTLIVED = (*REQUEUE, signal.SIGINT)


@final
@option
class Reading:
    """Options of how `MapData` reads samples; the samples of an update do not depend on them.

    >>> Reading(retries=5).timeout_s
    300.0
    """

    prefetch_batches: Count = 2
    """Global batches that the workers read ahead, all together."""
    timeout_s: Positive = 300.0
    """Longest wait for a worker, in seconds."""
    retries: Natural = 2
    """Number of times that a sample that fails is read again."""
    skip_failing: bool = False
    """Leave out a sample that still fails, as an incident, with its weight; if it fails in `collate` or `__getitems__`,
    with all of its micro-batch. Else it is an error."""


class Request(NamedTuple):
    """One micro-batch to read; `samples` are the indices, or numbers of draws, that seed the samples."""

    epoch: int
    batch: int
    microbatch: int
    samples: list[int]
    indices: list[int]
    epoch_key: int

    def __str__(self) -> str:
        return f"micro-batch {self.microbatch} of batch {self.batch} of epoch {self.epoch}"


class Reply(NamedTuple):
    """A micro-batch, and the faults that it survived; `samples` are their indices, if all have arrived."""

    data: object = None
    num_samples: int = 0
    samples: Sequence[int] = ()
    faults: tuple[DataFault, ...] = ()

    def pin_memory(self) -> "Reply":
        # called by torch's pinning thread
        return self._replace(data=pin(self.data))


@final
class Fetcher(Dataset[Reply | DataFault]):
    """Answers requests. To a `DataLoader` it looks like a dataset whose samples are micro-batches."""

    def __init__(self, dataset: Any, collate: Collate, reading: Reading, *, packed: bool) -> None:
        self._dataset = dataset
        self._collate = collate
        self._reading = reading
        self._told = with_set_epoch(dataset)
        self._epoch: int | None = None
        self._rows = rows_of(dataset) if collate is DEFAULT_COLLATE else None
        self._many: Any = getattr(dataset, "__getitems__", None) if fetches_many(dataset) else None
        self._may_drop = collate is not DEFAULT_COLLATE and not packed  # rows of packed samples are no samples
        self.seeded: Literal["sample", "microbatch", "never"] = "sample"
        if draws_nothing(dataset) and collate is DEFAULT_COLLATE:
            self.seeded = "never"
        elif draws_nothing(dataset) or self._many is not None:
            self.seeded = "microbatch"

    def __getitem__(self, request: Request) -> Reply | DataFault:
        """A micro-batch, or the error of user code that there is none for."""
        faults: list[DataFault] = []
        failure: DataFault | None = None
        for number in count(1):
            reply = self._read(request)
            if isinstance(reply, Reply):
                if failure is not None and not faults:
                    faults.append(replace(failure, message=f"it was read at try {number}: {failure.message}"))
                return reply._replace(faults=tuple(faults)) if faults else reply
            failure = reply
            left_out = failure.samples
            if number > self._reading.retries:
                if not self._reading.skip_failing or not left_out:
                    break
                message = f"left out: {failure.message}"
                faults.append(replace(failure, message=message, num_skipped=len(left_out)))
                numbered = zip(request.samples, request.indices, strict=True)
                kept = [(sample, index) for sample, index in numbered if index not in left_out]
                request = request._replace(samples=[one[0] for one in kept], indices=[one[1] for one in kept])
        return cast("DataFault", failure)

    def _read(self, request: Request) -> Reply | DataFault:
        if not request.samples:
            return Reply()
        doing: int | str = "set_epoch"
        indices = request.indices
        try:
            self._tell(request)
            doing = "__getitems__"
            if self._rows is not None:
                return Reply(self._rows(indices), len(indices), indices)
            if self.seeded == "microbatch":
                seed_generators(mix(key(request.epoch_key, "microbatch", request.batch, request.microbatch)))
            if self._many is not None:
                samples = self._many(indices)
            else:
                samples: list[object] = []
                for sample, doing in zip(request.samples, indices, strict=True):
                    if self.seeded == "sample":
                        seed_generators(mix(request.epoch_key ^ sample))
                    samples.append(self._dataset[doing])
            doing = "collate"
            batch = self._collate(samples)
            num_samples = num_arrived(batch, samples) if self._may_drop else len(indices)
            return Reply(batch, num_samples, indices if num_samples == len(indices) else ())
        except Exception as error:  # noqa: BLE001 - carried as a value, out of the worker; the receiver raises it
            return self._failure(request, doing, error)

    def _tell(self, request: Request) -> None:
        if self._epoch == request.epoch and all(_TELLERS.get(id(one)) is self for one in self._told):
            return
        for one in self._told:
            if self.seeded != "never":
                seed_generators(mix(key(request.epoch_key, "set_epoch")))
            one.set_epoch(request.epoch)
            _TELLERS[id(one)] = self
        self._epoch = request.epoch

    def _failure(self, request: Request, doing: int | str, error: Exception) -> DataFault:
        samples = request.indices
        what, advice = f"`{doing}` of the samples {first_of(samples)}", "correct it"
        if max(samples) >= len(self._dataset):
            advice = (
                f"the dataset has {len(self._dataset)} samples now, but must keep its length: draw an epoch's samples "
                f"by `MapData(sampling=…)`"
            )
        if isinstance(doing, int):
            what, samples = f"sample {doing} of the dataset", [doing]
        message = f"{what} raised {clause(error)} ({request}); {advice}."
        details = "".join(traceback.format_exception(error)).rstrip()
        return DataFault(message=message, samples=[] if doing == "set_epoch" else samples, details=details)


# by `id` of a dataset, the fetcher that called its `set_epoch` last: parts of one dataset may be read by turns
_TELLERS: WeakValueDictionary[int, Fetcher] = WeakValueDictionary()


def read_here(fetcher: Fetcher, batches: Iterator[list[Request]], *, pins: bool) -> Iterator[Reply | DataFault]:
    """Answer the requests of one batch after the other in this process, and restore its random generators."""
    for requests in batches:
        with nullcontext() if fetcher.seeded == "never" else undisturbed():
            replies = [fetcher[request] for request in requests]
        for reply in replies:
            yield reply.pin_memory() if pins and isinstance(reply, Reply) else reply


@final
class _Requests:
    """Requests for a loader, which does not hold the `WorkerLoader`: that ends the workers when it is collected."""

    source: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.source


@final
class WorkerLoader:
    """Processes that answer requests ahead of time, `per_batch` for a global batch; replies may be pinned."""

    def __init__(self, fetcher: Fetcher, reading: Reading, num_workers: int, per_batch: int, *, pins: bool) -> None:
        self.pins = pins
        self.is_lost = False
        self._timeout_s = reading.timeout_s
        self._requests = _Requests()
        self._loader: DataLoader[Reply | DataFault] = DataLoader(
            fetcher,
            batch_size=None,
            sampler=cast(Any, self._requests),
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pins,
            timeout=min(reading.timeout_s, _LONGEST_WAIT_S),
            generator=torch.Generator(),  # its own, or the loader would draw a number from the user's generator
            prefetch_factor=max(1, ceil(reading.prefetch_batches * per_batch / num_workers)),
            persistent_workers=True,
            worker_init_fn=_outlive_signals,
        )
        self._replies: Iterator[Reply | DataFault] | None = None

    def read(self, requests: Iterator[Request]) -> Iterator[Reply | DataFault]:
        """Answer `requests` from now on, in their order; replies due to earlier ones are thrown away."""
        self._requests.source = requests
        try:
            if self._replies is None:
                with _starting():
                    self._replies = iter(self._loader)
                # At exit Python sends a signal that the workers ignore, and waits for them; this comes before.
                Finalize(self, _end, args=(self._replies,), exitpriority=10)
            else:
                iter(self._loader)  # torch resets the same iterator
        except (TypeError, AttributeError, PicklingError, RuntimeError, OSError, EOFError) as error:
            raise self._loss(error) from error
        while True:
            try:
                for worker in workers_of(self._replies):
                    if not worker.is_alive():
                        raise RuntimeError(f"data worker {worker.pid} has ended with exit code {worker.exitcode}")
                reply = next(self._replies)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                raise self._loss(error) from error
            yield reply

    def close(self) -> None:
        """End the processes."""
        _end(self._replies, at_once=self.is_lost)

    def _loss(self, error: Exception) -> DataError:
        self.is_lost = True
        return DataError(
            f"the {self._loader.num_workers} data workers failed: {clause(str(error) or type(error).__name__)}. "
            f"`num_workers=0` shows why; a killed worker may have run out of memory, a wait may take "
            f"{self._timeout_s:g} s, and under `spawn` dataset and collate are pickled and a script needs `if __name__ "
            f"== '__main__':`.",
            field="num_workers",
        )


def _unchanged(reply: Any) -> Any:
    return reply


def _end(replies: object, *, at_once: bool = False) -> None:
    workers = workers_of(replies)
    for worker in workers if at_once else ():
        worker.kill()  # torch would wait 5 s for a worker that hangs
    end_workers(replies)
    for worker in workers:
        if worker.is_alive():  # it does not end at torch's SIGTERM
            worker.kill()
            worker.join()


@contextmanager
def _starting() -> Generator[None]:
    # A starting worker has not yet installed its handlers; torch's SIGCHLD handler raises anywhere, also halfway
    # through an optimizer step.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _outlive_signals(_worker: int) -> None:
    # A signal to the whole process group must stop the run only: it may need data before it stops.
    for number in _OUTLIVED:
        signal.signal(number, _stay)  # not SIG_IGN, which programs that a dataset starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)


def _stay(_number: int, _frame: FrameType | None) -> None: ...
