"""Global batches of a stream: samples, or ready-made batches, that come one after the other without a length.

A stream is read in its own order, and resumes by its own state, which is taken after each global batch. It is not
shuffled, divided between ranks or prefetched here: that is the stream's own work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

from evenstep.data.arguments import require_callable, require_count, require_rank
from evenstep.data.batch import JSON, Data, DataFault, GlobalBatch, Microbatch, Position
from evenstep.data.batching import cut_by_count, share
from evenstep.data.dataset import fingerprint_of
from evenstep.data.fetch import DEFAULT_COLLATE, Collate
from evenstep.data.pin import can_pin, pin
from evenstep.data.probe import probe
from evenstep.data.stream import Stateful, check_stream, samples_in, stream_epoch_setters
from evenstep.data.stream_ranks import Alike, Guessed, OneRank, Ranks, Together, Total
from evenstep.data.stream_reader import END, Reader
from evenstep.errors import ArgumentError, DataError

__all__ = ["StreamData"]

_BY_LOOKS = samples_in
_STATES_KEPT = 2  # that before the last global batch, which may not be committed, and that after it
_STATE = {"epoch", "batch", "stream_epoch", "stream"}


@dataclass(slots=True, kw_only=True)
class _Cursor:
    """Where a stream is being read: the one thing here that changes.

    Args:
        reader: of the stream.
        position: of the next global batch.
        state: of the stream, after the last global batch; None where there was none, or it has none.
        waiting: whether this rank's stream has ended in this epoch, while those of others go on.
        owed: a state that is to be put into the stream when the next epoch begins, and the epoch that it is of.
    """

    reader: Reader
    position: Position
    state: dict[str, Any] | None = None
    waiting: bool = False
    owed: tuple[dict[str, Any], int] | None = None


class _Share(NamedTuple):
    """A rank's part of each global batch of a stream.

    Args:
        stream_of: the rank whose stream is read; 0 where all read the same.
        rank, ranks: which of how many take micro-batches from what is read.
        num_items: what is read: samples, or ready-made batches.
        first: the number of the first micro-batch of what is read.
        num_microbatches: over all ranks; None where what is read tells.
        others: who else reads.
    """

    stream_of: int
    rank: int
    ranks: int
    num_items: int
    first: int
    num_microbatches: int | None
    others: Ranks


@final
class StreamData(Data):
    """Global batches of whatever can be iterated.

    Iterating the stream again is the next epoch; one that can be iterated only once, as a generator, ends with it.
    Its `set_epoch(epoch)`, if it has one, is called before each. Where it has `state_dict` and `load_state_dict`,
    training resumes without replaying it: the state kept is the one after the last global batch that was handed
    out, not after what was read ahead to see whether the epoch ends. A run that is to be saved tries that at its
    start (see `try_resume`).

    What the stream draws from torch's, numpy's and Python's global generators is keyed by (seed, epoch, item, rank).

    On several ranks each rank has its own stream, and takes its share of the micro-batches from it. They need not be
    equally long: an epoch ends for all when the last one has ended; those that ended earlier take part without samples
    until then. Such a run resumes on the same number of ranks only. With `shared` all ranks have the same stream, read
    the whole of it, and each collates its share of the micro-batches; then it is the run of one process, and resumes
    on any number of ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: the most samples of a micro-batch; None for no limit.
        collate: makes the batch of a list of samples.
        batched: whether the stream gives ready-made batches.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: the number of samples of a ready-made batch; by default the first dimension of its first part.
        shared: whether all ranks read the same stream, instead of each its own.
        exact_resume: False for a stream whose state is known not to say all, as one with a shuffle buffer: a resumed
            run goes on near where it was, with other samples, and nothing is tried.

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
        shared: bool = False,
        exact_resume: bool = True,
    ) -> None:
        check_stream(stream, gives_batches=batched or collate is not DEFAULT_COLLATE)
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
        self._shared = shared
        self._exact_resume = exact_resume
        self._cursor: _Cursor | None = None
        self._states: dict[Position, dict[str, object]] = {}  # of the last positions, the newest last
        self._loaded = False  # whether the newest has yet to be put into the stream
        self._was_told = False  # that this rank's stream is shorter
        self._was_compared = False  # with those of other ranks

    @property
    def resumable(self) -> bool:
        """Whether the stream has `state_dict` and `load_state_dict`."""
        return self._stateful is not None

    @property
    def state_is_of_rank(self) -> bool:
        """Whether each rank reads a stream of its own, so that what one has read says nothing of the others'."""
        return not self._shared

    def try_resume(self) -> str:
        """Save, read on, go back and read again: whether the stream's state says all, on its first items.

        The stream is left at its beginning. One that can't be put back there is tried on a copy.

        Returns:
            What is to be said about it; "" where a resume gave the same items.

        Raises:
            DataError: a resume gave other items, or the stream fails.
        """
        if self._stateful is None or self._states or self._cursor is not None:
            return ""  # it has no state, or is being read
        name = type(self._stream).__name__
        if not self._exact_resume:
            return f"the stream, a {name}, was said not to resume exactly: a resumed run will take other samples."
        return probe(self._stream, self._set_epoch)

    def num_batches(self, epoch: int, *, seed: int) -> None:
        """None: only reading the stream tells."""

    def fingerprint(self) -> dict[str, JSON]:
        """The sizes, and the stream's own `fingerprint`."""
        fingerprint: dict[str, JSON] = {
            "kind": "stream",
            "global_batch_size": self._global_batch_size,
            "batched": self._batched,
            "num_microbatches": self._num_microbatches,
            "stream": fingerprint_of(self._stream),
        }
        return {**fingerprint, "shared": True} if self._shared else fingerprint

    def state_dict(self, at: Position | None = None) -> dict[str, object]:
        """The stream's state at a position; empty at the first.

        Args:
            at: the position of the last global batch handed out, or the one after it; None means the latter.

        Raises:
            DataError: the stream has no state, or that position is neither.
        """
        self._require_stateful()
        if at is None:
            at = next(reversed(self._states), None)
        if at is None or (at == Position() and at not in self._states):
            return {}
        if at not in self._states:
            raise DataError(
                f"the stream's state at batch {at.batch} of epoch {at.epoch} is not kept: it was read on since then."
            )
        return deepcopy(self._states[at])

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up what `state_dict` gave; the next `batches` must start at the position it was taken at.

        Raises:
            DataError: the stream has no state, or this is not one.
        """
        self._require_stateful()
        if state and set(state) - {"waiting"} != _STATE:
            raise DataError(
                f"the state given holds {sorted(state)}, which is not the state of a stream; resume with the data "
                "that the checkpoint was written with."
            )
        self._cursor = None
        self._states = {_position_of(state): deepcopy(dict(state))} if state else {}
        self._loaded = bool(state)

    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        """Give the global batches from `start` on: the beginning of an epoch, or where the stream is.

        Of several ranks this one takes the others' streams to be as long as its own; see `batches_together`.

        Raises:
            ArgumentError: `rank` is not one of `ranks`, or a global batch has no micro-batch for it.
            DataError: the stream is not at `start`; later, it fails, or gives nothing.
        """
        return self._batches(start, seed=seed, part=self._share(rank, ranks, None), pins=pin_memory)

    def batches_together(
        self, start: Position, *, seed: int, rank: int, ranks: int, total: Total, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        """The same, of ranks that agree on each global batch: how many samples it has, and whether its epoch ends."""
        return self._batches(start, seed=seed, part=self._share(rank, ranks, total), pins=pin_memory)

    def whole_batches(self, start: Position, *, seed: int, ranks: int, total: Total | None) -> Iterator[GlobalBatch]:
        """All of each global batch, on every rank; they agree that they have the same, if there is a `total`."""
        part = self._share(0, 1, None)
        if total is not None and ranks > 1:
            part = part._replace(others=Alike(total, ranks))
        return self._batches(start, seed=seed, part=part, pins=False)

    def close(self) -> None:
        """Let go of the stream's iterator, with whatever it read ahead."""
        self._cursor = None

    def _batches(self, start: Position, *, seed: int, part: _Share, pins: bool) -> Iterator[GlobalBatch]:
        state = self._states.get(start)
        if self._loaded:
            cursor = self._resume(next(iter(self._states.values())), start, seed, part)
        elif self._cursor is not None and self._cursor.position == start:
            cursor = self._cursor
        elif state:
            cursor = self._resume(state, start, seed, part)
            self._states = {start: state}
        elif start.batch == 0:
            cursor = _Cursor(reader=self._reader(seed, part), position=start)
            self._states = {}
        else:
            raise DataError(
                f"the stream cannot start at batch {start.batch} of epoch {start.epoch}: it was given no state to go "
                "there; load the state that was saved with that position, or start at an epoch's beginning."
            )
        self._cursor = cursor
        return self._generate(cursor, part, pins=pins and can_pin())

    def _reader(self, seed: int, part: _Share) -> Reader:
        return Reader(self._stream, self._set_epoch, seed=seed, rank=part.stream_of)

    def _generate(self, cursor: _Cursor, part: _Share, *, pins: bool) -> Iterator[GlobalBatch]:
        while cursor.waiting or cursor.reader.ahead is not END or self._begin_epoch(cursor, part):
            position = cursor.position
            items = [] if cursor.waiting else self._read(cursor, part.num_items)
            microbatches, num_samples, num_microbatches = self._cut(items, part, position)
            if pins:
                for microbatch in microbatches:
                    microbatch.data = pin(microbatch.data)
            more = cursor.reader.ahead is not END
            num_samples, goes_on = part.others.taken(num_samples, more=more)
            cursor.position = following = position.after(ends_epoch=not goes_on)
            faults = self._ran_out(cursor, part, following) if goes_on and not more else ()
            if not self._was_compared:
                faults += self._compared(items, part)
            self._keep(cursor, position)
            yield GlobalBatch(
                position=position,
                following=following,
                microbatches=microbatches,
                num_microbatches=num_microbatches,
                num_samples=num_samples,
                ends_epoch=not goes_on,
                faults=faults,
            )

    def _keep(self, cursor: _Cursor, before: Position) -> None:
        """Keep the state of the position that `cursor` has come to."""
        cursor.waiting = cursor.waiting and bool(cursor.position.batch)
        if self._stateful is None:
            return
        self._states.setdefault(before, {})
        self._states[cursor.position] = {
            "epoch": cursor.position.epoch,
            "batch": cursor.position.batch,
            "stream_epoch": before.epoch,
            "stream": cursor.state,
            "waiting": cursor.waiting,
        }
        while len(self._states) > _STATES_KEPT:
            del self._states[next(iter(self._states))]

    def _ran_out(self, cursor: _Cursor, part: _Share, following: Position) -> tuple[DataFault, ...]:
        """Wait for the others, whose streams are longer; said once."""
        was_told, self._was_told, cursor.waiting = self._was_told, True, True
        if was_told:
            return ()
        return (
            DataFault(
                message=(
                    f"the stream of rank {part.stream_of} ended after {following.batch} global batches of epoch "
                    f"{following.epoch}, before those of other ranks: until they end, it takes part without samples."
                )
            ),
        )

    def _compared(self, items: list[object], part: _Share) -> tuple[DataFault, ...]:
        """Say that all ranks read the same, which is seldom meant, at their first global batch."""
        self._was_compared = True
        if not part.others.read_the_same(items):
            return ()
        return (
            DataFault(
                message=(
                    "all ranks have read the same first items from their streams, so every sample would count once for "
                    "each rank; give each rank another part of the data, or pass `shared=True` to have one stream "
                    "dealt over all."
                )
            ),
        )

    def _read(self, cursor: _Cursor, num_items: int) -> list[object]:
        try:
            items, cursor.state = cursor.reader.take(num_items)
        except Exception as error:
            raise self._failed(error, cursor.position) from error
        return items

    def _cut(self, items: list[object], part: _Share, position: Position) -> tuple[tuple[Microbatch, ...], int, int]:
        """This rank's micro-batches of what was read, its samples, and the number of micro-batches over all ranks."""
        size = 1 if self._batched else self._micro_batch_size or max(1, len(items))
        edges = cut_by_count(len(items), size)
        mine = share(len(edges) - 1, rank=part.rank, ranks=part.ranks)
        microbatches: list[Microbatch] = []
        for number in mine:
            some = items[edges[number] : edges[number + 1]]
            data = some[0] if self._batched else self._collated(some, position)
            count = self._samples_in(data) if self._batched else len(some)
            microbatches.append(
                Microbatch(index=part.first + number, data=data, num_samples=count, counted=self._counts)
            )
        if self._batched and self._shared:
            num_samples = sum(map(self._samples_in, items))
        else:
            num_samples = len(items) if not self._batched else sum([one.num_samples for one in microbatches])
        num_microbatches = len(edges) - 1 if part.num_microbatches is None else part.num_microbatches
        return tuple(microbatches), num_samples, num_microbatches

    def _collated(self, samples: list[object], position: Position) -> object:
        try:
            return self._collate(samples)
        except Exception as error:
            self._cursor = None
            raise DataError(
                f"collating batch {position.batch} of epoch {position.epoch} of the stream raised "
                f"{type(error).__name__}: {error}; make its samples alike, or pass a `collate` function that makes "
                "one batch of a list of them."
            ) from error

    def _begin_epoch(self, cursor: _Cursor, part: _Share) -> bool:
        """Read the first item of an epoch; False where the data have ended."""
        epoch, reader = cursor.position.epoch, cursor.reader
        over = False
        try:
            if cursor.owed is not None:
                (state, stream_epoch), cursor.owed = cursor.owed, None
                reader.go_to(state, epoch=stream_epoch, number=0)
                if reader.ahead is not END:
                    # The epoch was read to its end, and at that the stream went to the beginning of the next.
                    reader.go_to(state, epoch=epoch, number=0)
            if reader.ahead is END:
                over = not reader.begin(epoch)
        except Exception as error:
            raise self._failed(error, cursor.position) from error
        gives = reader.ahead is not END
        if not part.others.begun(epoch, gives=gives, over=over):
            return False
        if not gives:
            cursor.waiting, cursor.state = True, reader.state()
        return True

    def _resume(self, state: Mapping[str, object], start: Position, seed: int, part: _Share) -> _Cursor:
        """Put a state into the stream and read the item after it; later, where that is of another epoch."""
        position = _position_of(state)
        if position != start:
            raise DataError(
                f"the stream's state is of batch {position.batch} of epoch {position.epoch}, but it is to start at "
                f"batch {start.batch} of epoch {start.epoch}; load the state that was saved with that position."
            )
        stream, stream_epoch = cast("dict[str, Any]", state["stream"]), cast(int, state["stream_epoch"])
        cursor = _Cursor(
            reader=self._reader(seed, part),
            position=position,
            state=stream,
            waiting=bool(state.get("waiting")),
        )
        self._loaded = False
        if position.batch == 0 or cursor.waiting:
            cursor.owed = stream, stream_epoch
            return cursor
        try:
            cursor.reader.go_to(stream, epoch=stream_epoch, number=position.batch * part.num_items)
        except Exception as error:
            raise self._failed(error, position) from error
        if cursor.reader.ahead is END:
            raise DataError(
                f"the stream, put at batch {position.batch} of epoch {position.epoch}, gives nothing more, though "
                "there was more when the run was saved; it is another stream, or its `load_state_dict` is wrong."
            )
        return cursor

    def _share(self, rank: int, ranks: int, total: Total | None) -> _Share:
        require_rank(rank, ranks)
        if self._batched:
            edges = list(range(self._num_microbatches + 1))
        else:
            size = cast(int, self._global_batch_size)
            edges = cut_by_count(size, self._micro_batch_size or size)
        if ranks == 1 or self._shared:
            others = OneRank() if total is None or ranks == 1 else Alike(total, ranks)
            return _Share(0, rank, ranks, edges[-1], 0, None, others)
        microbatches = share(len(edges) - 1, rank=rank, ranks=ranks)
        if not microbatches:
            raise ArgumentError(
                f"each of the {ranks} ranks reads its own stream and needs a micro-batch of each global batch, but "
                f"there are {len(edges) - 1}; raise the global batch or lower `micro_batch_size`."
            )
        num_items, num_microbatches = edges[microbatches.stop] - edges[microbatches.start], len(edges) - 1

        def scaled(num_samples: int) -> int:
            if not self._batched and num_samples == num_items:
                return edges[-1]
            return num_samples * num_microbatches // len(microbatches)

        others = Guessed(scaled) if total is None else Together(total, ranks)
        return _Share(rank, 0, 1, num_items, microbatches.start, num_microbatches, others)

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


def _position_of(state: Mapping[str, object]) -> Position:
    return Position(epoch=cast(int, state["epoch"]), batch=cast(int, state["batch"]))


def _refuse(given: dict[str, bool], reason: str) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ArgumentError(f"`{name}` does nothing {reason}")
