"""Global batches of a stream: samples, or ready-made batches, that come one after the other without a length.

A stream is read in its own order, and resumes by its own state, which is taken after each global batch. It is not
shuffled, divided between ranks or prefetched here: that is the stream's own work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast, final

from evenstep.data.arguments import require_callable, require_count, require_rank
from evenstep.data.batch import JSON, Data, GlobalBatch, Microbatch, Position
from evenstep.data.batching import cut_by_count, share
from evenstep.data.dataset import fingerprint_of
from evenstep.data.fetch import DEFAULT_COLLATE, Collate
from evenstep.data.pin import can_pin, pin
from evenstep.data.stream import Stateful, samples_in, stream_epoch_setters
from evenstep.errors import ArgumentError, DataError

__all__ = ["StreamData"]

_END = object()
_BY_LOOKS = samples_in
_UNCHANGING = frozenset({int, float, str, bool, bytes, type(None)})


@dataclass(slots=True, kw_only=True)
class _Cursor:
    """Where a stream is being read: the one thing here that changes."""

    position: Position  # of the next global batch
    iterator: Iterator[object] | None = None
    ahead: object = _END  # the item after the last global batch; _END where an epoch has to be begun
    failure: Exception | None = None  # raised while looking ahead; due when that item is


class _Share(NamedTuple):
    """A rank's part of each global batch of a stream.

    Args:
        microbatches: the numbers of its micro-batches.
        num_items: what it takes from its stream: samples, or ready-made batches.
        num_microbatches: over all ranks.
        num_samples: over all ranks; None where the batches tell.
    """

    microbatches: range
    num_items: int
    num_microbatches: int
    num_samples: int | None


@final
class StreamData(Data):
    """Global batches of whatever can be iterated.

    Iterating the stream again is the next epoch; one that can be iterated only once, as a generator, ends with it.
    Its `set_epoch(epoch)`, if it has one, is called before each. Where it has `state_dict` and `load_state_dict`,
    training resumes without replaying it: the state kept is the one after the last global batch that was handed
    out, not after what was read ahead to see whether the epoch ends.

    On several ranks each rank has its own stream, and its epochs must have as many batches as the others'. A rank
    takes its share of the micro-batches from it; the `num_samples` of a global batch that is not full, or of
    ready-made batches, is then this rank's count scaled to all ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: the most samples of a micro-batch; None for no limit.
        collate: makes the batch of a list of samples.
        batched: whether the stream gives ready-made batches.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: the number of samples of a ready-made batch; by default the first dimension of its first part.

    Raises:
        ArgumentError: an argument cannot be, or does nothing beside the others.

    >>> data = StreamData(range(10), global_batch_size=4)
    >>> batches = data.batches(Position(), seed=1)
    >>> [next(batches).num_samples for _ in range(4)]
    [4, 4, 2, 4]
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        collate: Collate = DEFAULT_COLLATE,
        batched: bool = False,
        num_microbatches: int = 1,
        samples_in: Callable[[Any], int] = samples_in,
    ) -> None:
        if not hasattr(stream, "__iter__"):
            raise ArgumentError(
                f"`stream` must be something to iterate, but is a {type(stream).__name__}; write its `__iter__`, or "
                "feed a dataset that gives samples by number with `MapData`."
            )
        require_callable("collate", collate, purpose="makes one batch of a list of samples")
        require_callable("samples_in", samples_in, purpose="counts the samples of a batch")
        if batched:
            _refuse(
                {
                    "global_batch_size": global_batch_size is not None,
                    "micro_batch_size": micro_batch_size is not None,
                    "collate": collate is not DEFAULT_COLLATE,
                },
                "with ready-made batches (`batched`); leave it out, or let the stream give samples.",
            )
        else:
            _refuse(
                {"num_microbatches": num_microbatches != 1},
                "for a stream of samples; set `micro_batch_size`, or give ready-made batches with `batched=True`.",
            )
            require_count("global_batch_size", global_batch_size)
        if micro_batch_size is not None:
            require_count("micro_batch_size", micro_batch_size)
        self._stream = stream
        self._stateful = stream if isinstance(stream, Stateful) else None
        self._set_epoch = stream_epoch_setters(stream)
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._collate = collate
        self._batched = batched
        self._num_microbatches = require_count("num_microbatches", num_microbatches)
        self._samples_in, self._counts = samples_in, not batched or samples_in is not _BY_LOOKS
        self._cursor: _Cursor | None = None
        self._state: dict[str, object] = {}  # as of the last global batch that was handed out
        self._loaded = False  # whether that state has yet to be put into the stream

    @property
    def resumable(self) -> bool:
        """Whether the stream has `state_dict` and `load_state_dict`."""
        return self._stateful is not None

    def num_batches(self, epoch: int, *, seed: int) -> None:
        """None: only reading the stream tells."""

    def fingerprint(self) -> dict[str, JSON]:
        """The sizes, and the stream's own `fingerprint`."""
        return {
            "kind": "stream",
            "global_batch_size": self._global_batch_size,
            "batched": self._batched,
            "num_microbatches": self._num_microbatches,
            "stream": fingerprint_of(self._stream),
        }

    def state_dict(self) -> dict[str, object]:
        """The stream's state after the last global batch handed out; empty before the first.

        Raises:
            DataError: the stream has no state.
        """
        self._require_stateful()
        return deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up what `state_dict` gave; the next `batches` must start at the position it was taken at.

        Raises:
            DataError: the stream has no state, or this is not one.
        """
        self._require_stateful()
        if state and set(state) != {"epoch", "batch", "stream_epoch", "stream"}:
            raise DataError(
                f"the state given holds {sorted(state)}, which is not the state of a stream; resume with the data "
                "that the checkpoint was written with."
            )
        self._cursor = None
        self._state = deepcopy(dict(state))
        self._loaded = bool(state)

    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        """Give the global batches from `start` on: the beginning of an epoch, or where the stream is.

        The seed is not used: a stream's randomness is its own.

        Raises:
            ArgumentError: `rank` is not one of `ranks`, or a global batch has no micro-batch for it.
            DataError: the stream is not at `start`; later, it fails, or gives nothing.
        """
        require_rank(rank, ranks)
        part = self._share(rank, ranks)
        if self._loaded:
            cursor = self._resume(start)
        elif self._cursor is not None and self._cursor.position == start:
            cursor = self._cursor
        elif start.batch == 0:
            cursor = _Cursor(position=start)
            self._state = {}
        else:
            raise DataError(
                f"the stream cannot start at batch {start.batch} of epoch {start.epoch}: it was given no state to go "
                "there; load the state that was saved with that position, or start at an epoch's beginning."
            )
        self._cursor = cursor
        return self._generate(cursor, part, alone=ranks == 1, pins=pin_memory and can_pin())

    def close(self) -> None:
        """Let go of the stream's iterator, with whatever it read ahead."""
        self._cursor = None

    def _generate(self, cursor: _Cursor, part: _Share, *, alone: bool, pins: bool) -> Iterator[GlobalBatch]:
        while cursor.ahead is not _END or self._begin_epoch(cursor):
            position = cursor.position
            items, stream_state = self._read(cursor, part.num_items)
            batches, counts = self._cut(items, position)
            if pins:
                batches = [pin(batch) for batch in batches]
            microbatches = tuple(
                [
                    Microbatch(index=index, data=batch, num_samples=count, counted=self._counts)
                    for index, batch, count in zip(part.microbatches, batches, counts, strict=False)
                ]
            )
            num_samples = sum(counts)
            ends_epoch = cursor.ahead is _END
            cursor.position = following = position.after(ends_epoch=ends_epoch)
            if self._stateful is not None:
                self._state = {
                    "epoch": following.epoch,
                    "batch": following.batch,
                    "stream_epoch": position.epoch,
                    "stream": stream_state,
                }
            yield GlobalBatch(
                position=position,
                following=following,
                microbatches=microbatches,
                num_microbatches=len(microbatches) if alone else part.num_microbatches,
                num_samples=num_samples if alone else _over_all_ranks(num_samples, len(items), part),
                ends_epoch=ends_epoch,
            )

    def _read(self, cursor: _Cursor, num_items: int) -> tuple[list[object], dict[str, Any] | None]:
        """The items of one global batch, and the stream's state after them; then look ahead at the next item."""
        iterator = cursor.iterator
        assert iterator is not None
        if cursor.failure is not None:
            raise self._failed(cursor.failure, cursor.position) from cursor.failure
        items = [cursor.ahead]
        item: object = None
        try:
            # Not with islice: it calls iter() again, at which some iterators begin anew.
            while len(items) < num_items and (item := next(iterator, _END)) is not _END:
                items.append(item)
            # Taken before looking ahead: a run that resumes from it must be given the item that is looked at.
            state = None if self._stateful is None else _copied(self._stateful.state_dict())
        except Exception as error:
            raise self._failed(error, cursor.position) from error
        try:
            cursor.ahead = _END if item is _END else next(iterator, _END)
        except Exception as error:  # noqa: BLE001 - due with the next batch: this one is whole
            cursor.ahead, cursor.failure = None, error
        return items, state

    def _cut(self, items: list[object], position: Position) -> tuple[list[object], list[int]]:
        """The micro-batches of what was read, and the samples in each."""
        if self._batched:
            return items, [self._samples_in(batch) for batch in items]
        edges = cut_by_count(len(items), self._micro_batch_size or len(items))
        try:
            batches = [self._collate(items[start:end]) for start, end in pairwise(edges)]
        except Exception as error:
            self._cursor = None
            raise DataError(
                f"collating batch {position.batch} of epoch {position.epoch} of the stream raised "
                f"{type(error).__name__}: {error}; make its samples alike, or pass a `collate` function that makes "
                "one batch of a list of them."
            ) from error
        return batches, [end - start for start, end in pairwise(edges)]

    def _begin_epoch(self, cursor: _Cursor) -> bool:
        """Read the first item of an epoch; False at the end of a stream that can be iterated only once."""
        epoch = cursor.position.epoch
        try:
            for set_epoch in self._set_epoch:
                set_epoch(epoch)
            iterator = iter(self._stream)
            cursor.ahead = next(iterator, _END)
        except Exception as error:
            raise self._failed(error, cursor.position) from error
        is_same = iterator is cursor.iterator
        cursor.iterator = iterator
        if cursor.ahead is not _END:
            return True
        if is_same:
            return False
        raise DataError(
            f"the stream gave nothing in epoch {epoch}; check what it reads. A generator, and what is made of one, "
            "can be iterated only once: give an object whose `__iter__` begins anew."
        )

    def _resume(self, start: Position) -> _Cursor:
        """Put the loaded state into the stream and read the item after it."""
        position = Position(epoch=cast(int, self._state["epoch"]), batch=cast(int, self._state["batch"]))
        if position != start:
            raise DataError(
                f"the stream's state is of batch {position.batch} of epoch {position.epoch}, but it is to start at "
                f"batch {start.batch} of epoch {start.epoch}; load the state that was saved with that position."
            )
        cursor = _Cursor(position=position)
        try:
            self._load(cursor, cast(int, self._state["stream_epoch"]))
            if cursor.ahead is not _END and position.batch == 0 and self._set_epoch:
                # The epoch was read to its end, and at that the stream went to the beginning of the next.
                self._load(cursor, position.epoch)
        except Exception as error:
            raise self._failed(error, position) from error
        if cursor.ahead is _END and position.batch:
            raise DataError(
                f"the stream, put at batch {position.batch} of epoch {position.epoch}, gives nothing more, though "
                "there was more when the run was saved; it is another stream, or its `load_state_dict` is wrong."
            )
        self._loaded = False
        return cursor

    def _load(self, cursor: _Cursor, epoch: int) -> None:
        for set_epoch in self._set_epoch:
            set_epoch(epoch)
        cast(Stateful, self._stateful).load_state_dict(deepcopy(cast(dict[str, Any], self._state["stream"])))
        cursor.iterator = iter(self._stream)
        cursor.ahead = next(cursor.iterator, _END)

    def _share(self, rank: int, ranks: int) -> _Share:
        if self._batched:
            edges = list(range(self._num_microbatches + 1))
        else:
            size = cast(int, self._global_batch_size)
            edges = cut_by_count(size, self._micro_batch_size or size)
        microbatches = share(len(edges) - 1, rank=rank, ranks=ranks)
        if not microbatches:
            raise ArgumentError(
                f"each of the {ranks} ranks reads its own stream and needs a micro-batch of each global batch, but "
                f"there are {len(edges) - 1}; raise the global batch or lower `micro_batch_size`."
            )
        num_items = edges[microbatches.stop] - edges[microbatches.start]
        return _Share(microbatches, num_items, len(edges) - 1, None if self._batched else edges[-1])

    def _failed(self, error: Exception, position: Position) -> DataError:
        self._cursor = None
        return DataError(
            f"the stream raised {type(error).__name__}: {error} (reading batch {position.batch} of epoch "
            f"{position.epoch}); correct the stream, or let it leave out what it cannot read."
        )

    def _require_stateful(self) -> None:
        if self._stateful is None:
            raise DataError(
                f"the stream, a {type(self._stream).__name__}, cannot say where it is, so a run on it cannot be "
                "resumed; give it `state_dict()` and `load_state_dict(state)`, use torchdata's StatefulDataLoader, "
                "or train on a dataset that gives samples by number, with `MapData`."
            )


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state that the stream can't change any more; most are a few counters, and one is taken in every update."""
    if type(state) is dict and _UNCHANGING.issuperset(map(type, state.values())):
        return state.copy()
    return deepcopy(state)


def _refuse(given: dict[str, bool], reason: str) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ArgumentError(f"`{name}` does nothing {reason}")


def _over_all_ranks(num_samples: int, num_items: int, part: _Share) -> int:
    if part.num_samples is not None and num_items == part.num_items:
        return part.num_samples
    return num_samples * part.num_microbatches // len(part.microbatches)
