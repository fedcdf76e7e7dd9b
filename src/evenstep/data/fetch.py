"""Reads and collates one micro-batch, in the training process or in a worker, with the same result.

A failure is returned as a value. A sample that fails may be read again or left out.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast, final

from torch.utils.data import (
    Dataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType] - torch leaves the type of its list open
)

from evenstep.data.batch import DataFault
from evenstep.data.dataset import MapDataset, Told, draws_nothing, epoch_setters, fetches_many, rows_of
from evenstep.data.seeding import seed_generators
from evenstep.data.split import num_arrived
from evenstep.data.tree import pin
from evenstep.errors import DataError, clause
from evenstep.keys import key, mix

Collate = Callable[[list[Any]], object]

DEFAULT_COLLATE = cast(Collate, default_collate)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How `MapData` reads samples; which samples make an update does not depend on it.

    Args:
        prefetch_batches: how many global batches the workers read ahead, all together.
        timeout_s: longest wait for a worker, in seconds.
        retries: how many times a sample that fails is read again.
        skip_failing: whether a sample that still fails is left out, as an incident, with its weight; if it fails in
            `collate` or `__getitems__`, with all of its micro-batch. Else it is an error.
        seed_samples: False leaves the generators alone, for datasets that draw no random numbers.

    >>> Reading(retries=2).timeout_s
    300.0
    """

    prefetch_batches: int = 2
    timeout_s: float = 300.0
    retries: int = 0
    skip_failing: bool = False
    seed_samples: bool = True


class Seeding(Enum):
    """What the generators are seeded for."""

    SAMPLE = "each sample"
    MICROBATCH = "each micro-batch"
    NEVER = "nothing, since nothing is drawn"

    @staticmethod
    def of(dataset: object, collate: Collate, *, seed_samples: bool) -> "Seeding":
        """The least seeding under which the data are the same for every number of workers."""
        if not seed_samples or (draws_nothing(dataset) and collate is DEFAULT_COLLATE):
            return Seeding.NEVER
        return Seeding.MICROBATCH if draws_nothing(dataset) or fetches_many(dataset) else Seeding.SAMPLE


class Request(NamedTuple):
    """One micro-batch to fetch: its place, its samples (perhaps none), and the epoch's key for randomness."""

    epoch: int
    batch: int
    microbatch: int
    samples: list[int]
    epoch_key: int

    def __str__(self) -> str:
        return f"micro-batch {self.microbatch} of batch {self.batch} of epoch {self.epoch}"


class Failure(NamedTuple):
    """What went wrong in user code: a sentence for the person who must act, and the traceback."""

    message: str
    details: str
    doing: int | str = ""  # the number of the sample, or what was done with all of them

    def error(self) -> DataError:
        """The error to raise, with the traceback as its note."""
        error = DataError(self.message)
        error.add_note(self.details)
        return error


class Reply(NamedTuple):
    """A fetched micro-batch, or why there is none; and the faults that it survived."""

    data: object
    failure: Failure | None
    num_samples: int = 0
    faults: tuple[DataFault, ...] = ()

    def pin_memory(self) -> "Reply":
        """Called by torch's pinning thread."""
        return self._replace(data=pin(self.data))


@final
class Fetcher(Dataset[Reply]):
    """Answers requests. To a `DataLoader` it looks like a dataset whose samples are micro-batches."""

    def __init__(self, dataset: MapDataset, collate: Collate, reading: Reading, *, packed: bool = False) -> None:
        self._may_drop = collate is not DEFAULT_COLLATE and not packed  # rows of packed samples are no samples
        self._dataset = dataset
        self._collate = collate
        self.seeding = Seeding.of(dataset, collate, seed_samples=reading.seed_samples)
        self._reading = reading
        self._set_epoch = epoch_setters(dataset)
        self._rows = rows_of(dataset) if collate is DEFAULT_COLLATE else None
        many: Callable[[list[int]], list[object]] | None = getattr(dataset, "__getitems__", None)
        self._many = many if fetches_many(dataset) else None
        self._epoch: int | None = None
        self._told = Told(self._set_epoch)

    def __getitem__(self, request: Request) -> Reply:
        faults: list[DataFault] = []
        reply = self._tried(request)
        tries = 0
        while reply.failure is not None and tries < self._reading.retries:
            tries += 1
            failure = reply.failure
            reply = self._tried(request)
            if reply.failure is None:
                faults.append(_survived(failure, f"it was read at try {tries + 1}"))
        if reply.failure is not None and self._reading.skip_failing and reply.failure.doing != "set_epoch":
            reply = self._without_failing(request, reply.failure, faults)
        return reply._replace(faults=tuple(faults)) if faults else reply

    def _tried(self, request: Request) -> Reply:
        if not request.samples:
            return Reply(None, None)
        doing: int | str = "set_epoch"
        try:
            if request.epoch != self._epoch or self._told.by_others:
                self._enter(request)
            doing = "samples"
            if self._rows is not None:
                return Reply(self._rows(request.samples), None, len(request.samples))
            if self.seeding is Seeding.MICROBATCH:
                seed_generators(mix(key(request.epoch_key, "microbatch", request.batch, request.microbatch)))
            if self._many is not None:
                samples = self._many(request.samples)
            else:
                samples: list[object] = []
                for doing in request.samples:
                    if self.seeding is Seeding.SAMPLE:
                        seed_generators(mix(request.epoch_key ^ doing))
                    samples.append(self._dataset[doing])
            doing = "collate"
            batch = self._collate(samples)
            return Reply(batch, None, num_arrived(batch, samples) if self._may_drop else len(samples))
        except Exception as error:  # noqa: BLE001 - carried as a value, out of the worker; the receiver raises it
            return Reply(None, _failure(request, doing, error))

    def _without_failing(self, request: Request, failure: Failure, faults: list[DataFault]) -> Reply:
        while True:
            doing = failure.doing
            left_out = [doing] if isinstance(doing, int) else request.samples
            faults.append(_survived(failure, "left out", samples=left_out, num_skipped=len(left_out)))
            request = request._replace(samples=[sample for sample in request.samples if sample not in left_out])
            reply = self._tried(request)
            if reply.failure is None:
                return reply
            failure = reply.failure

    def _enter(self, request: Request) -> None:
        for set_epoch in self._set_epoch:
            if self.seeding is not Seeding.NEVER:
                seed_generators(mix(key(request.epoch_key, "set_epoch")))
            set_epoch(request.epoch)
        self._epoch = request.epoch
        self._told.remember()


def _failure(request: Request, doing: int | str, error: Exception) -> Failure:
    some = ", ".join(map(str, request.samples[:8])) + (", …" if len(request.samples) > 8 else "")
    what, advice = {
        "set_epoch": (f"set_epoch({request.epoch}) of the dataset", "correct it"),
        "samples": (f"reading the samples {some} of the dataset at once", "correct its `__getitems__`"),
        "collate": (f"collating the samples {some}", "make them alike, or pass a `collate` function that batches them"),
    }.get(str(doing), (f"sample {doing} of the dataset", f"`dataset[{doing}]` shows it alone: correct or remove it"))
    details = "".join(traceback.format_exception(error)).rstrip()
    return Failure(f"{what} raised {clause(error)} ({request}); {advice}.", details, doing)


def _survived(
    failure: Failure, outcome: str, *, samples: Sequence[int] | None = None, num_skipped: int = 0
) -> DataFault:
    if samples is None:
        samples = [failure.doing] if isinstance(failure.doing, int) else []
    which = f" (samples {', '.join(map(str, samples))})" if len(samples) > 1 else ""
    what = f"{outcome}{which}: {failure.message}"
    return DataFault(message=what, samples=samples, num_skipped=num_skipped, details=failure.details)
