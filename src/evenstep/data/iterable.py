"""Global batches of what can only be iterated: streams of samples, of ready-made batches, of whole updates.

A stream is read one item ahead, because only that tells whether an epoch has ended. It resumes by its own state.
"""

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal, NamedTuple, Protocol, Self, cast, final, runtime_checkable
from zlib import crc32

from torch.utils.data import DataLoader

from evenstep.arguments import require_count
from evenstep.data.batch import JSON, Data, DataFault, GlobalBatch, Microbatch, Part, Position, ReadOptions, batches_in
from evenstep.data.batching import cut_by_count
from evenstep.data.dataset import EpochSetters, epoch_setters, fingerprint_of
from evenstep.data.loader import DEFAULT_COLLATE, Collate
from evenstep.data.seeding import global_states, seed_generators, undisturbed
from evenstep.data.split import num_arrived, samples_in
from evenstep.data.tree import can_pin, pin
from evenstep.errors import ArgumentError, DataError, clause
from evenstep.keys import key, mix

END = object()
_BY_SHAPE = samples_in
_STATE = {"epoch", "batch", "stream_epoch", "stream", "waiting"}
_UNCHANGING = frozenset({int, float, str, bool, bytes, type(None)})
_WATCHED = 4  # first items; a stream that draws nothing for them is taken to draw nothing


@runtime_checkable
class Stateful(Protocol):
    """A stream that knows its place, such as torchdata's `StatefulDataLoader`.

    After `load_state_dict(state)` the next `iter()` goes on with the item after the last one given before
    `state_dict()` gave `state`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@final
class Reader:
    """A place in a stream.

    torch's, numpy's and Python's global generators are seeded from (seed, epoch, number of the item, rank) before each
    item, so its random numbers depend neither on the model nor on where the run was stopped.

    Attributes:
        ahead: the next item; `END` where the epoch has ended, or none was begun.
        state: a copy of the stream's state after the items taken last; None before, or without one.
    """

    def __init__(self, stream: Iterable[Any], setters: EpochSetters, *, seed: int, rank: int) -> None:
        self.ahead: object = END
        self.state: dict[str, Any] | None = None
        self._stream: Any = stream
        self._setters = setters
        self._seed = seed
        self._rank = rank
        self._iterator: Any = None
        self._failure: Exception | None = None  # raised by looking ahead; due when that item is taken
        self._epoch = 0
        self._epoch_key = 0
        self._number = 0  # of the item ahead, in its epoch
        self._draws: bool | None = None  # None while it is not known
        self._watched = 0

    def begin(self, epoch: int, *, state: dict[str, Any] | None = None, number: int = 0) -> bool:
        """Begin an epoch, or go to a state in it, and look at the next item, which is `number` of the epoch.

        Returns:
            False for a stream that can be iterated only once, and was.
        """
        before = self._iterator
        self._failure = None
        with undisturbed():
            self._set_epoch(epoch)
            self._number = number - 1
            if state is not None:
                self._stream.load_state_dict(deepcopy(state))
            self._iterator = iter(self._stream)
            self.ahead = self._next()
        return self.ahead is not END or before is None or self._iterator is not before

    def take(self, count: int) -> list[object]:
        """The next items, as many as the epoch still has, up to `count`."""
        if self._failure is not None:
            raise self._failure
        items = [self.ahead]
        with nullcontext() if self._draws is False else undisturbed():
            if not self._setters.are_at(self._epoch):
                self._set_epoch(self._epoch)
            item: object = None
            while len(items) < count and item is not END:
                item = self._next()
                if item is not END:
                    items.append(item)
            if isinstance(self._stream, Stateful):  # before looking ahead, as a resumed run must be given that item
                self.state = _copy_of(self._stream.state_dict())
            try:
                self.ahead = END if item is END else self._next()
            except Exception as error:  # noqa: BLE001 - due with the next items: these are whole
                self.ahead = None
                self._failure = error
        return items

    def beginning(self) -> dict[str, Any] | None:
        """State of the stream before it is read; None if it has none yet."""
        with undisturbed():
            self._set_epoch(0)
            try:
                return deepcopy(self._stream.state_dict())
            except Exception:  # noqa: BLE001 - some streams have a state only once they are read
                return None

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._epoch_key = key(self._seed, "stream", epoch, self._rank)
        seed_generators(self._epoch_key)  # also for `iter`, in which a loader draws the order of its epoch
        self._setters(epoch)

    def _next(self) -> object:
        self._number += 1
        if self._draws is False:
            return next(self._iterator, END)
        seed_generators(mix(self._epoch_key ^ self._number))
        before = None if self._draws else global_states()
        item = next(self._iterator, END)
        if before is not None:
            self._watched += 1
            self._draws = True if global_states() != before else None if self._watched < _WATCHED else False
        return item


def _copy_of(state: dict[str, Any]) -> dict[str, Any]:
    if type(state) is dict and _UNCHANGING.issuperset(map(type, state.values())):
        return state.copy()  # most are a few counters, and it is taken in every update
    return deepcopy(state)


@final
class StreamShare:
    """A rank's part of each global batch, and the agreement of the ranks on its size and on the end of an epoch.

    An epoch ends for all when the longest stream has ended. Ranks whose streams ended earlier take part without
    samples, so nothing is dropped or repeated.

    Args:
        edges: of the micro-batches of a global batch, in items.
        shared: whether all ranks read one stream, and take their micro-batches of it.

    Attributes:
        stream: the rank whose stream is read; 0 where all read the same.
        num_items: items that are read for a global batch.
        num_microbatches: over all ranks; None where the items tell.
    """

    def __init__(self, edges: Sequence[int], read: ReadOptions, *, shared: bool) -> None:
        self.shared = shared or read.ranks == 1
        self._read = read
        self._ranks = read.ranks
        mine = range(len(edges) - 1) if self.shared else read.share(len(edges) - 1)
        self.stream = 0 if self.shared else read.rank
        self.first = mine.start
        self.num_items = edges[mine.stop] - edges[mine.start]
        self.num_microbatches = None if self.shared else len(edges) - 1

    def numbers(self, num_read: int) -> range:
        """Numbers of this rank's micro-batches among those read."""
        return self._read.share(num_read) if self.shared else range(num_read)

    def begun(self, epoch: int, *, gives: bool, over: bool) -> bool:
        """Agree on whether `epoch` exists; False where the data have ended.

        Args:
            gives: whether this rank's stream gives something in it.
            over: whether this rank's stream can't be iterated again.
        """
        giving, ended, ranks = self._sum(gives, over, 1)
        if ended == ranks:
            return False
        if ended or (self.shared and giving not in (0, ranks)):
            raise self._differ(f"in epoch {epoch} those of {int(giving)} ranks give something")
        if not giving:
            raise DataError(
                f"the stream gave nothing in epoch {epoch}; check its source. A generator can be iterated only "
                f"once: give an object whose `__iter__` starts again."
            )
        return True

    def taken(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        """Samples of a global batch over all ranks, and whether any rank has more in this epoch."""
        samples, having_more, squares, ranks = self._sum(num_samples, more, num_samples**2, 1)
        if not self.shared:
            return int(samples), having_more > 0
        if squares * ranks != samples**2 or having_more not in (0, ranks):
            found = f"a global batch has {num_samples} samples here and {samples / ranks:g} on average, and"
            raise self._differ(f"{found} {int(having_more)} have more in this epoch")
        return num_samples, more

    def reads_the_same(self, items: object) -> bool:
        """Whether ranks that should read different streams have read the same items."""
        if self.shared:
            return False
        try:
            mine = float(crc32(pickle.dumps(items)) % 2**20)  # whose square is exact
        except Exception:  # noqa: BLE001 - what can't be pickled can't be compared
            mine = float("nan")
        sums, squares, ranks = self._sum(mine, mine**2, 1)
        return ranks > 1 and squares * ranks == sums**2

    def _sum(self, *numbers: float) -> Sequence[float]:
        own = [float(number) for number in numbers]
        return own if self._read.total is None or self._ranks == 1 else self._read.total(own)

    def _differ(self, found: str) -> DataError:
        must = "read the same stream, whatever their rank" if self.shared else "read streams that begin anew alike"
        return DataError(f"all {self._ranks} ranks must {must}, but {found}; give each rank such a stream.")


class _Piece(NamedTuple):
    items: Any  # of one micro-batch
    num_samples: int
    task: str = ""


class _Cursor:
    def __init__(self, reader: Reader, share: StreamShare, position: Position) -> None:
        self.reader = reader
        self.share = share
        self.position = position
        self.exhausted = False  # this rank's stream has ended in this epoch, those of other ranks go on
        self.pending_state: tuple[dict[str, Any], int] | None = None  # state to load at the next epoch start, its epoch
        self.faults: list[str] = []


class StreamData(Data):
    """Global batches of an iterable.

    Each epoch iterates the stream again; a run on a generator, which can be iterated only once, ends with it. If the
    stream has `set_epoch(epoch)`, that is called before each epoch. Random numbers that the stream draws from the
    global generators of torch, numpy and Python are keyed by (seed, epoch, item, rank).

    With `state_dict` and `load_state_dict` a run resumes exactly, without reading the stream from its beginning. A
    stream without them trains and keeps checkpoints too, but a resume begins its epoch again; torchdata's
    `StatefulDataLoader` resumes exactly.

    On several ranks each rank has its own stream, and takes its part of the micro-batches from it. Streams may differ
    in length: an epoch ends for all when the longest one has ended; until then the others take part without samples.
    Such a run resumes on the same number of ranks only, unless the stream has an attribute `global_state = True`: then
    its state counts the items of all ranks, and may be loaded on another number of ranks. With `shared` all ranks read
    the same stream whole, and each collates its part of the micro-batches: the run is that of one process, and resumes
    on any number of ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: the most samples of a micro-batch, not more than of a global batch; None for no limit.
        collate: makes the batch of a list of samples.
        batched: whether the stream gives ready-made batches.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: the number of samples of a ready-made batch; by default dim 0 of its tensors.
        shared: whether all ranks read the same stream, instead of each its own.
        limit_batches: the global batches after which the data end, to try things out; None for no limit.

    Raises:
        ArgumentError: `stream` can't be iterated, or a size is no whole number above 0.

    >>> data = StreamData(range(10), global_batch_size=4)
    >>> batches = data.batches(ReadOptions(seed=1))
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
        limit_batches: int | None = None,
    ) -> None:
        check_stream(stream, gives_batches=batched or collate is not DEFAULT_COLLATE)
        if not batched:
            require_count("global_batch_size", global_batch_size)
        self.limit_batches = limit_batches
        self._stream = stream
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._collate = collate
        self._batched = batched
        self._num_microbatches = require_count("num_microbatches", num_microbatches)
        self._samples_in = samples_in
        self._shared = shared
        self._stateful = stream if isinstance(stream, Stateful) else None
        self._has_global_state = bool(getattr(stream, "global_state", False))
        self._setters = EpochSetters(stream_epoch_setters(stream))
        self._cursor: _Cursor | None = None
        # before and after the last global batch, which may not be committed; the newest last
        self._states: dict[Position, dict[str, Any]] = {}
        self._beginning: dict[str, Any] | None = None  # state of the stream before it was read
        self._said: set[str] = set()

    @property
    def state(self) -> Self:
        return self

    @property
    def scope(self) -> Literal["run", "rank"]:
        return "run" if self._shared or self._has_global_state or self.positions == "epochs" else "rank"

    @property
    def positions(self) -> Literal["last", "epochs"]:
        return "last" if self._stateful is not None and self.limit_batches is None else "epochs"

    @property
    def moving_stream(self) -> object:
        """The stream that a second reader would move; None for one that begins anew for each."""
        return self._stream if self._stateful is not None or isinstance(self._stream, Iterator) else None

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
            "cut": {"micro_batch_size": self._micro_batch_size},
        }
        return {**fingerprint, "shared": True} if self._shared else fingerprint

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        """State of the stream at the position before or after the last global batch; empty at the first.

        Raises:
            DataError: the stream was read on since then.
        """
        at = next(reversed(self._states), None) if at is None else at
        if self._stateful is None or at is None or (at == Position() and at not in self._states):
            return {}
        if at not in self._states:
            raise DataError(
                f"the stream's state at batch {at.batch} of epoch {at.epoch} is not kept: it was read on since then."
            )
        return deepcopy(self._states[at])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and (self._stateful is None or set(state) != _STATE):
            raise DataError(
                f"the state given holds {sorted(state)}, which is not the state of this stream, a "
                f"{type(self._stream).__name__}; resume with the data that the checkpoint was written with."
            )
        self._cursor = None
        self._states = {Position(state["epoch"], state["batch"]): deepcopy(dict(state))} if state else {}

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        """Give the global batches from `read.start` on: where the stream is or was, or the begin of an epoch."""
        start, ranks = read.start, read.ranks
        share = StreamShare(self._edges(), read, shared=self._shared)
        uneven = self._has_global_state and share.num_microbatches is not None and share.num_microbatches % ranks
        if not share.num_items or uneven:
            raise ArgumentError(
                f"each of the {ranks} ranks reads its own stream and needs micro-batches of each global batch, of one "
                f"with `global_state` as many as the others, but there are {share.num_microbatches}. Make more of "
                f"them: a larger global batch, a smaller `micro_batch_size`, a larger `num_microbatches`; or pass "
                f"`shared=True` if all ranks read the same stream.",
                field="micro_batch_size",
            )
        if self._cursor is None or self._cursor.position != start:
            reader = Reader(self._stream, self._setters, seed=read.seed, rank=share.stream)
            self._cursor = self._started(_Cursor(reader, share, start), start)
        self._cursor.share = share
        return self._generate(self._cursor, pins=read.pin_memory and can_pin())

    def close(self) -> None:
        self._cursor = None

    def _edges(self) -> Sequence[int]:
        if self._batched:
            return range(self._num_microbatches + 1)
        size = cast(int, self._global_batch_size)
        return cut_by_count(size, self._micro_batch_size or size)

    def _started(self, cursor: _Cursor, start: Position) -> _Cursor:
        state = self._states.get(start)
        self._states = {start: state} if state else {}
        if state:
            self._resume(cursor, state)
        elif start.batch and self.positions == "last":
            raise DataError(
                f"the stream cannot start at batch {start.batch} of epoch {start.epoch}: it was given no state to go "
                f"there; load the state that was saved with that position, or start at an epoch's beginning."
            )
        elif start.batch:
            cursor.faults.append(
                f"the stream can't go to batch {start.batch} of epoch {start.epoch} and begins that epoch again, as it "
                f"has no `state_dict`; torchdata's StatefulDataLoader goes on exactly"
            )
        elif start == Position() and self._stateful is not None:
            if self._beginning is None:
                self._beginning = cursor.reader.beginning()
            else:  # a run that goes back may have left it in the midst, and iterating it may go on from there
                with self._reading(start):
                    self._stateful.load_state_dict(deepcopy(self._beginning))
        return cursor

    def _resume(self, cursor: _Cursor, state: Mapping[str, Any]) -> None:
        position, reader = cursor.position, cursor.reader
        reader.state = state["stream"]
        cursor.exhausted = bool(state["waiting"])
        if position.batch and not cursor.exhausted:
            with self._reading(position):
                number = position.batch * cursor.share.num_items
                reader.begin(state["stream_epoch"], state=state["stream"], number=number)
            if reader.ahead is not END:
                return
            if not self._has_global_state:
                raise DataError(
                    f"the stream gives nothing after batch {position.batch} of epoch {position.epoch}, but gave more "
                    f"before the checkpoint; give the same stream, and check its `load_state_dict`."
                )
            cursor.exhausted = True
        cursor.pending_state = state["stream"], state["stream_epoch"]

    def _generate(self, cursor: _Cursor, *, pins: bool) -> Iterator[GlobalBatch]:
        while cursor.exhausted or cursor.reader.ahead is not END or self._begins_epoch(cursor):
            position, share = cursor.position, cursor.share
            items: list[object] = []
            if not cursor.exhausted:
                with self._reading(position):
                    items = cursor.reader.take(share.num_items)
            try:
                pieces = self._pieces(items)
                numbers = share.numbers(len(pieces))
                microbatches = [self._microbatch(pieces[one], share.first + one, position) for one in numbers]
            except Exception:
                self._cursor = None  # a new start here must be given these items again
                raise
            if pins:
                for microbatch in microbatches:
                    microbatch.data = pin(microbatch.data)
            is_last = position.batch + 1 == self.limit_batches
            more = cursor.reader.ahead is not END and not is_last
            num_samples, goes_on = share.taken(sum(piece.num_samples for piece in pieces), more=more)
            cursor.position = position.after(ends_epoch=not goes_on)
            cursor.exhausted = goes_on and not more
            self._keep(cursor, position)
            yield GlobalBatch(
                position=position,
                following=cursor.position,
                microbatches=tuple([one for one in microbatches if one.num_samples]),
                num_microbatches=len(pieces) if share.num_microbatches is None else share.num_microbatches,
                num_samples=num_samples,
                ends_epoch=not goes_on,
                faults=self._faults(cursor, items),
                parts=self._parts(pieces),
            )
            if is_last:  # a stream can't skip the rest of its epoch
                return

    def _pieces(self, items: list[Any]) -> list[_Piece]:
        if self._batched:
            return [_Piece(item, self._samples_in(item)) for item in items]
        size = self._micro_batch_size or max(1, len(items))
        pieces = [items[begin : begin + size] for begin in range(0, len(items), size)]
        return [_Piece(piece, len(piece)) for piece in pieces]

    def _microbatch(self, piece: _Piece, index: int, position: Position) -> Microbatch:
        if self._batched:
            counted = self._samples_in is not _BY_SHAPE
            return Microbatch(
                index=index, data=piece.items, num_samples=piece.num_samples, task=piece.task, counted=counted
            )
        try:
            data = self._collate(piece.items)
        except Exception as error:
            raise DataError(
                f"collating batch {position.batch} of epoch {position.epoch} of the stream raised {clause(error)}; "
                f"make its samples alike, or pass a `collate` function that makes one batch of a list of them.",
                field="collate",
            ) from error
        in_columns = self._collate is DEFAULT_COLLATE
        arrived = piece.num_samples if in_columns else num_arrived(data, piece.items)
        return Microbatch(index=index, data=data, num_samples=arrived, in_columns=in_columns)

    def _parts(self, pieces: Sequence[_Piece]) -> tuple[Part, ...]:
        return ()

    def _begins_epoch(self, cursor: _Cursor) -> bool:
        epoch, reader = cursor.position.epoch, cursor.reader
        over = False
        with self._reading(cursor.position):
            if cursor.pending_state is not None:
                state, stream_epoch = cursor.pending_state
                cursor.pending_state = None
                reader.begin(stream_epoch, state=state)
                if reader.ahead is not END:  # the stream had gone to the beginning of the next epoch by itself
                    reader.begin(epoch, state=state)
            if reader.ahead is END:
                over = not reader.begin(epoch)
        gives = reader.ahead is not END
        cursor.exhausted = not gives
        return cursor.share.begun(epoch, gives=gives, over=over)

    def _keep(self, cursor: _Cursor, before: Position) -> None:
        if self._stateful is None:
            return
        after = cursor.position
        state: dict[str, Any] = {
            "epoch": after.epoch,
            "batch": after.batch,
            "stream_epoch": before.epoch,
            "stream": cursor.reader.state,
            "waiting": cursor.exhausted,
        }
        self._states = {before: self._states.get(before, {}), after: state}

    def _faults(self, cursor: _Cursor, items: list[object]) -> tuple[DataFault, ...]:
        found = cursor.faults
        cursor.faults = []
        if cursor.exhausted and "ended" not in self._said:
            self._said.add("ended")
            found.append(
                f"the stream of rank {cursor.share.stream} ended after {cursor.position.batch} global batches of epoch "
                f"{cursor.position.epoch}, before those of other ranks: until they end, it takes part without samples"
            )
        if "compared" not in self._said:
            self._said.add("compared")
            if cursor.share.reads_the_same(items):
                found.append(
                    "all ranks have read the same first items from their streams, so every sample would count once for "
                    "each rank; give each rank another part of the data, or pass `shared=True` (`data.shared = true`)"
                )
        return tuple(DataFault(message=f"{message}.") for message in found)

    @contextmanager
    def _reading(self, position: Position) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self._cursor = None
            raise DataError(
                f"the stream raised {clause(error)} (reading batch {position.batch} of epoch {position.epoch}); "
                f"correct the stream, or let it leave out unreadable items."
            ) from error


@final
class UpdateData(StreamData):
    """The updates of an iterable: a tuple of batches, or one batch; see `batches_in`.

    On several ranks all iterate over the same updates, and each runs its share of an update's batches.

    Args:
        stream: gives one update after the other; iterating it again is the next epoch. To resume exactly it needs
            `state_dict` and `load_state_dict`.
        samples_in: the number of samples of a batch; by default dim 0 of its tensors.

    Raises:
        ArgumentError: it cannot be iterated.

    >>> data = UpdateData([((["a"], "class"), (["b", "c"], "box"))], samples_in=len)
    >>> batch = next(data.batches(ReadOptions(seed=1)))
    >>> [(one.index, one.task, one.data) for one in batch.microbatches], batch.num_samples
    ([(0, 'class', ['a']), (1, 'box', ['b', 'c'])], 3)
    """

    tasks = None

    def __init__(self, stream: Iterable[Any], *, samples_in: Callable[[Any], int] = samples_in) -> None:
        super().__init__(stream, batched=True, samples_in=samples_in, shared=True)

    def fingerprint(self) -> dict[str, JSON]:
        """The stream's own `fingerprint`."""
        batches: dict[str, JSON] = {"kind": "stream", "global_batch_size": None, "batched": True, "num_microbatches": 1}
        return {"kind": "updates", "stream": {**batches, "stream": fingerprint_of(self._stream)}}

    def _pieces(self, items: list[Any]) -> list[_Piece]:
        return [_Piece(one.data, self._samples_in(one.data), one.task) for one in batches_in(items[0])]

    def _parts(self, pieces: Sequence[_Piece]) -> tuple[Part, ...]:
        return tuple(Part(task=one.task, num_microbatches=1, num_samples=one.num_samples) for one in pieces)


def check_stream(stream: object, *, gives_batches: bool) -> None:
    """Raise ArgumentError unless `stream` can be iterated and gives samples, or with `gives_batches` batches."""
    name = type(stream).__name__
    if isinstance(stream, str | bytes | Mapping) or not hasattr(stream, "__iter__"):
        raise ArgumentError(f"`stream` must give samples when it is iterated, but is a {name}.", field="stream")
    if not gives_batches and isinstance(stream, DataLoader) and (cast(Any, stream).batch_size or 0) > 1:
        raise ArgumentError(
            f"`stream` must give samples, but this {name} gives batches of {cast(Any, stream).batch_size}; pass "
            f"`batched=True`, or give its dataset to `MapData`.",
            field="stream",
        )


def stream_epoch_setters(stream: object) -> list[Callable[[int], object]]:
    """The `set_epoch` of a stream; of a loader those of its dataset and samplers."""
    setters = epoch_setters(stream)
    if setters or not isinstance(stream, DataLoader):
        return setters
    loader = cast(Any, stream)
    of_dataset = epoch_setters(loader.dataset)
    if of_dataset and loader.persistent_workers:
        raise ArgumentError(
            "a DataLoader with `persistent_workers=True` never tells its workers of a new epoch, but its dataset has "
            "`set_epoch`; turn `persistent_workers` off, or give the dataset to `MapData`.",
            field="stream",
        )
    return of_dataset + epoch_setters(loader.sampler) + epoch_setters(loader.batch_sampler)
