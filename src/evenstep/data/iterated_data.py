"""Base class of data that can only be iterated; they resume by the state of their stream.

The state is kept before and after the last global batch, since that batch may not be committed.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, cast

from evenstep.data.batch import Data, DataFault, GlobalBatch, Microbatch, Part, Position
from evenstep.data.stream import END, Reader, Stateful, stream_epoch_setters
from evenstep.data.stream_ranks import StreamRanks, Total
from evenstep.data.tree import can_pin, pin
from evenstep.errors import DataError, clause

_STATE = {"epoch", "batch", "stream_epoch", "stream", "waiting"}


class RankReading(NamedTuple):
    """A rank's part of each global batch.

    Args:
        stream_of: the rank whose stream is read; 0 where all read the same.
        rank, ranks: which of how many take micro-batches from what is read.
        num_items: how many items of the stream are read for one.
        num_microbatches: over all ranks; None where what is read tells.
    """

    stream_of: int
    rank: int
    ranks: int
    num_items: int
    others: StreamRanks
    first: int = 0
    num_microbatches: int | None = None


class _Cursor:
    def __init__(self, reader: Reader, reading: RankReading, position: Position) -> None:
        self.reader, self.reading, self.position = reader, reading, position
        self.state: dict[str, Any] | None = None  # stream state after the last global batch
        self.waiting = False  # this rank's stream has ended in this epoch, those of other ranks go on
        self.owed: tuple[dict[str, Any], int] | None = None  # state to load at the next epoch start, with its epoch


class Cut(NamedTuple):
    """What was read for one global batch, cut."""

    microbatches: tuple[Microbatch, ...]
    num_samples: int
    num_microbatches: int
    parts: tuple[Part, ...] = ()


class IteratedData(Data):
    """Global batches of whatever can be iterated."""

    def __init__(self, stream: Iterable[Any], *, limit_batches: int | None = None) -> None:
        self.limit_batches = limit_batches
        self._stream = stream
        self._stateful = stream if isinstance(stream, Stateful) else None
        self._set_epoch = stream_epoch_setters(stream)
        self._cursor: _Cursor | None = None
        self._states: dict[Position, dict[str, object]] = {}  # of the last positions, the newest last
        self._loaded = False  # whether the newest has yet to be put into the stream
        self._beginning: dict[str, Any] | None = None  # state of the stream before it was read, if it gives one
        self._was_told = False  # that this rank's stream is shorter
        self._was_compared = False  # with those of other ranks

    @abstractmethod
    def _reading(self, rank: int, ranks: int, total: Total | None) -> RankReading: ...

    @abstractmethod
    def _cut(self, items: list[object], reading: RankReading, position: Position) -> Cut: ...

    @property
    def moving_stream(self) -> object:
        return self._stream if self._stateful is not None or isinstance(self._stream, Iterator) else None

    @property
    def resumable(self) -> bool:
        return self._stateful is not None and self.limit_batches is None

    def num_batches(self, epoch: int, *, seed: int) -> None:
        """None: only reading the stream tells."""

    def state_dict(self, at: Position | None = None) -> dict[str, object]:
        """The stream's state at a position; empty at the first.

        Args:
            at: the position of the last global batch handed out, or the one after it; None means the latter.
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
        """Take up what `state_dict` gave; the next `batches` must start at the position it was taken at."""
        self._require_stateful()
        if state and set(state) != _STATE:
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
        """
        return self._batches(start, seed=seed, reading=self._reading(rank, ranks, None), pins=pin_memory)

    def batches_together(
        self, start: Position, *, seed: int, rank: int, ranks: int, total: Total, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        """The same, of ranks that agree on each global batch: how many samples it has, and whether its epoch ends."""
        return self._batches(start, seed=seed, reading=self._reading(rank, ranks, total), pins=pin_memory)

    def close(self) -> None:
        self._cursor = None

    def _batches(self, start: Position, *, seed: int, reading: RankReading, pins: bool) -> Iterator[GlobalBatch]:
        state = self._states.get(start)
        if self._loaded:
            cursor = self._resume(next(iter(self._states.values())), start, seed, reading)
        elif self._cursor is not None and self._cursor.position == start:
            cursor, self._cursor.reading = self._cursor, reading
        elif state:
            cursor = self._resume(state, start, seed, reading)
            self._states = {start: state}
        elif start.batch == 0:
            if start == Position() and self._stateful is not None and self._beginning is not None:
                try:  # a run that goes back may have left it in the midst, and iterating it may go on from there
                    self._stateful.load_state_dict(deepcopy(self._beginning))
                except Exception as error:
                    raise self._failed(error, start) from error
            reader = self._reader(seed, reading)
            if start == Position() and self._stateful is not None and self._beginning is None:
                self._beginning = reader.beginning()
            cursor = _Cursor(reader, reading, start)
            self._states = {}
        else:
            raise DataError(
                f"the stream cannot start at batch {start.batch} of epoch {start.epoch}: it was given no state to go "
                "there; load the state that was saved with that position, or start at an epoch's beginning."
            )
        self._cursor = cursor
        return self._generate(cursor, pins=pins and can_pin())

    def _reader(self, seed: int, reading: RankReading) -> Reader:
        return Reader(self._stream, self._set_epoch, seed=seed, rank=reading.stream_of)

    def _generate(self, cursor: _Cursor, *, pins: bool) -> Iterator[GlobalBatch]:
        while cursor.waiting or cursor.reader.ahead is not END or self._begin_epoch(cursor):
            position, reading = cursor.position, cursor.reading
            items: list[object] = []
            if not cursor.waiting:
                try:
                    items, cursor.state = cursor.reader.take(reading.num_items)
                except Exception as error:
                    raise self._failed(error, position) from error
            try:
                cut = self._cut(items, reading, position)
            except Exception:
                self._cursor = None  # whoever begins here again must be given these items again
                raise
            if pins:
                for microbatch in cut.microbatches:
                    microbatch.data = pin(microbatch.data)
            is_last = position.batch + 1 == self.limit_batches
            more = cursor.reader.ahead is not END and not is_last
            num_samples, goes_on = reading.others.taken(cut.num_samples, more=more)
            cursor.position = following = position.after(ends_epoch=not goes_on)
            faults = self._ran_out(cursor) if goes_on and not more else ()
            if not self._was_compared:
                faults += self._compared(items, reading)
            self._keep(cursor, position)
            yield GlobalBatch(
                position=position,
                following=following,
                microbatches=cut.microbatches,
                num_microbatches=cut.num_microbatches,
                num_samples=num_samples,
                ends_epoch=not goes_on,
                faults=faults,
                parts=cut.parts,
            )
            if is_last:  # a stream can't skip what is left of its epoch
                return

    def _keep(self, cursor: _Cursor, before: Position) -> None:
        cursor.waiting = cursor.waiting and bool(cursor.position.batch)
        if self._stateful is None:
            return
        after = cursor.position
        state: dict[str, object] = {
            "epoch": after.epoch,
            "batch": after.batch,
            "stream_epoch": before.epoch,
            "stream": cursor.state,
            "waiting": cursor.waiting,
        }
        self._states = {before: self._states.get(before, {}), after: state}

    def _ran_out(self, cursor: _Cursor) -> tuple[DataFault, ...]:
        was_told, self._was_told, cursor.waiting = self._was_told, True, True
        if was_told:
            return ()
        return (
            DataFault(
                message=(
                    f"the stream of rank {cursor.reading.stream_of} ended after {cursor.position.batch} global batches "
                    f"of epoch {cursor.position.epoch}, before those of other ranks: until they end, it takes part "
                    f"without samples."
                )
            ),
        )

    def _compared(self, items: list[object], reading: RankReading) -> tuple[DataFault, ...]:
        self._was_compared = True
        if not reading.others.read_the_same(items):
            return ()
        return (
            DataFault(
                message=(
                    "all ranks have read the same first items from their streams, so every sample would count once for "
                    "each rank; give each rank another part of the data, or pass `shared=True`, in a run file "
                    "`data.shared = true`, to have one stream dealt over all."
                )
            ),
        )

    def _begin_epoch(self, cursor: _Cursor) -> bool:
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
        if not cursor.reading.others.begun(epoch, gives=gives, over=over):
            return False
        if not gives:
            cursor.waiting, cursor.state = True, reader.state()
        return True

    def _resume(self, state: Mapping[str, object], start: Position, seed: int, reading: RankReading) -> _Cursor:
        position = _position_of(state)
        if position != start:
            raise DataError(
                f"the stream's state is of batch {position.batch} of epoch {position.epoch}, but it is to start at "
                f"batch {start.batch} of epoch {start.epoch}; load the state that was saved with that position."
            )
        stream, stream_epoch = cast("dict[str, Any]", state["stream"]), cast(int, state["stream_epoch"])
        cursor = _Cursor(self._reader(seed, reading), reading, position)
        cursor.state, cursor.waiting = stream, bool(state["waiting"])
        self._loaded = False
        if position.batch == 0 or cursor.waiting:
            cursor.owed = stream, stream_epoch
            return cursor
        try:
            cursor.reader.go_to(stream, epoch=stream_epoch, number=position.batch * reading.num_items)
        except Exception as error:
            raise self._failed(error, position) from error
        if cursor.reader.ahead is END:
            raise DataError(
                f"the stream, put at batch {position.batch} of epoch {position.epoch}, gives nothing more, though "
                "there was more when the run was saved; it is another stream, or its `load_state_dict` is wrong."
            )
        return cursor

    def _failed(self, error: Exception, position: Position) -> DataError:
        self._cursor = None
        return DataError(
            f"the stream raised {clause(error)} (reading batch {position.batch} of epoch "
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
