"""Global batches of an iterable of samples, of ready-made batches, or of whole updates.

A stream is read one item ahead, because only that tells whether an epoch has ended. It resumes by its own state.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, cast, final, runtime_checkable
from zlib import crc32

from torch.utils.data import DataLoader

from evenstep.arguments import require_whole
from evenstep.data.batch import JSON, Data, DataFault, GlobalBatch, Microbatch, Part, Position, ReadOptions, batches_in
from evenstep.data.batching import cut_by_count, cut_evenly
from evenstep.data.dataset import EpochSetters, epoch_setters, fingerprint_of
from evenstep.data.loader import DEFAULT_COLLATE, Collate
from evenstep.data.seeding import generator_states, seed_generators, undisturbed
from evenstep.data.split import num_arrived, samples_in
from evenstep.data.tree import can_pin, pin
from evenstep.errors import ArgumentError, DataError, clause
from evenstep.keys import key, mix

_END = object()
_BY_SHAPE = samples_in
_STATE = {"epoch", "batch", "stream_epoch", "stream", "waiting"}
_WATCHED = 4  # first items; if they draw nothing, no item is seeded: 0.1 instead of 2 ms for a batch of 32 numbers


@runtime_checkable
class Stateful(Protocol):
    """A stream with a place, such as torchdata's `StatefulDataLoader`.

    After `load_state_dict` the next `iter()` goes on after the last item given before `state_dict()`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@final
class _Share:
    def __init__(self, edges: Sequence[int], read: ReadOptions, *, shared: bool) -> None:
        self.shared = shared or read.ranks == 1
        self.read = read
        mine = range(len(edges) - 1) if self.shared else read.share(len(edges) - 1)
        self.stream = 0 if self.shared else read.rank
        self.first = mine.start
        self.num_items = edges[mine.stop] - edges[mine.start]
        self.num_microbatches = None if self.shared else len(edges) - 1  # None: the items tell

    @property
    def key(self) -> tuple[int, ...]:
        return self.read.seed, self.stream, self.first, self.num_items

    def begin(self, epoch: int, *, gives: bool, over: bool) -> bool:
        giving, ended, ranks = self._sum(gives, over, 1)
        if ended == ranks:
            return False
        if ended or (self.shared and giving not in (0, ranks)):
            raise self._differ(f"in epoch {epoch} the streams of {int(giving)} ranks give something")
        if not giving:
            raise DataError(
                f"the stream gave nothing in epoch {epoch}; check its source. A generator can be iterated only once."
            )
        return True

    def total(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        samples, having_more, squares, ranks = self._sum(num_samples, more, num_samples**2, 1)
        if not self.shared:
            return int(samples), having_more > 0
        if squares * ranks != samples**2 or having_more not in (0, ranks):
            raise self._differ(f"a global batch has {num_samples} samples here and {samples / ranks:g} on average")
        return num_samples, more

    def reads_the_same(self, items: object) -> bool:
        if self.shared:
            return False
        mine = crc32(repr(items).encode()) % 2**20  # whose square is exact
        sums, squares, ranks = self._sum(mine, mine**2, 1)
        return ranks > 1 and squares * ranks == sums**2

    def _sum(self, *numbers: float) -> Sequence[float]:
        own = [float(number) for number in numbers]
        return own if self.read.total is None or self.read.ranks == 1 else self.read.total(own)

    def _differ(self, found: str) -> DataError:
        must = "read the same stream" if self.shared else "read streams that begin anew alike"
        return DataError(f"all {self.read.ranks} ranks must {must}, but {found}; give each rank such a stream.")


@final
class _Cursor:
    def __init__(self, stream: Iterable[Any], setters: EpochSetters, share: _Share) -> None:
        self.position = share.read.start
        self.share = share
        self.ahead: object = _END
        self.items: list[Any] | None = None  # taken, but not given yet as a global batch
        self.state: dict[str, Any] | None = None  # of the stream, after the items taken last
        self.in_epoch = False  # the ranks have agreed on the epoch of the position
        self.waiting = False  # the epoch goes on for other ranks only
        self._stream: Any = stream
        self._setters = setters
        self._iterator: Any = None
        self._epoch = 0
        self._epoch_key = 0
        self._number = 0  # of the item ahead, in its epoch
        self._num_still = 0  # first items that have drawn nothing

    def begin(self, epoch: int, *, state: dict[str, Any] | None = None, number: int = 0) -> bool:
        # begins an epoch, or goes to a state in it, and looks at item `number`; False for a used up generator
        before = self._iterator
        with undisturbed():
            self.set_epoch(epoch)
            self._number = number - 1
            if state is not None:
                self._stream.load_state_dict(deepcopy(state))
            self._iterator = iter(self._stream)
            self.ahead = self._next()
        return self.ahead is not _END or before is None or self._iterator is not before

    def begin_epoch(self) -> bool:
        epoch = self.position.epoch
        self.waiting = False
        if self.ahead is not _END:  # a loaded state was at the beginning of this epoch
            self.begin(epoch, state=self.state)
        return self.ahead is not _END or self.begin(epoch)

    def take(self) -> list[Any]:
        if self.waiting:
            return []
        items = [self.ahead]
        self.ahead = None
        with undisturbed() if self._num_still < _WATCHED else nullcontext():
            if not self._setters.are_at(self._epoch):
                self.set_epoch(self._epoch)
            while len(items) < self.share.num_items and self.ahead is not _END:
                self.ahead = self._next()
                if self.ahead is not _END:
                    items.append(self.ahead)
            if isinstance(self._stream, Stateful):  # before looking ahead: a resumed run must be given that item
                self.state = deepcopy(self._stream.state_dict())
            if self.ahead is not _END:
                self.ahead = self._next()
        return items

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._epoch_key = key(self.share.read.seed, "stream", epoch, self.share.stream)
        seed_generators(self._epoch_key)  # also for `iter`, in which a loader draws the order of its epoch
        self._setters(epoch)

    def _next(self) -> object:
        self._number += 1
        if self._num_still == _WATCHED:
            return next(self._iterator, _END)
        seed_generators(mix(self._epoch_key ^ self._number))
        before = None if self._num_still < 0 else generator_states()
        item = next(self._iterator, _END)
        if before is not None:
            self._num_still = self._num_still + 1 if generator_states() == before else -1
        return item


class StreamData(Data):
    """Global batches of an iterable.

    Each epoch iterates the stream again; a run on a generator, which can be iterated only once, ends with it. Random
    numbers from the global generators of torch, numpy and Python are keyed by (seed, epoch, item, rank). If the stream
    has `set_epoch(epoch)`, that is called before each epoch.

    With `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader` has them, a run resumes exactly. With a
    stream without them a resume begins its epoch again.

    Each rank reads its own stream; an epoch ends when the longest stream has ended. Such a run resumes on the same
    number of ranks only, unless the stream has `global_state = True`: its state then counts the items of all ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: most samples of a micro-batch; None divides each global batch among the ranks.
        collate: makes the batch of a list of samples.
        batched: whether the stream gives ready-made batches.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: number of samples of a ready-made batch; by default dim 0 of its tensors.
        shared: whether all ranks read the same stream, and each uses its part of every batch.
        limit_batches: number of global batches after which the data end, to try things out; None for no limit.

    Raises:
        ArgumentError: `stream` can't be iterated, or a size is no whole number above 0.

    >>> batches = StreamData(range(10), global_batch_size=4).batches(ReadOptions(seed=1))
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
        _check_stream(stream, gives_batches=batched or collate is not DEFAULT_COLLATE)
        if not batched:
            require_whole("global_batch_size", global_batch_size)
        self.limit_batches = limit_batches
        self._stream = stream
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._collate = collate
        self._batched = batched
        self._num_microbatches = require_whole("num_microbatches", num_microbatches)
        self._samples_in = samples_in
        self._shared = shared
        self._stateful = stream if isinstance(stream, Stateful) else None
        self._has_global_state = bool(getattr(stream, "global_state", False))
        self._setters = EpochSetters(stream_epoch_setters(stream))
        self._cursor: _Cursor | None = None
        # before and after the last global batch, which may not be committed; the newest last
        self._states: dict[Position, dict[str, Any]] = {}
        self._beginning: dict[str, Any] = {}  # state before the stream was read
        self._notice = ""
        self._compared = False  # the first items of the ranks

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
        """The stream, if a second reader would move it."""
        return self._stream if self._stateful is not None or isinstance(self._stream, Iterator) else None

    def num_batches(self, epoch: int, *, seed: int) -> None:
        """None: only reading the stream tells."""

    def fingerprint(self) -> dict[str, JSON]:
        """The sizes, and the stream's own `fingerprint`."""
        return {
            "kind": "stream",
            "global_batch_size": self._global_batch_size,
            "batched": self._batched,
            "num_microbatches": self._num_microbatches,
            "shared": self._shared,
            "stream": fingerprint_of(self._stream),
            "cut": {"micro_batch_size": self._micro_batch_size},
        }

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        """State of the stream at the position before or after the last global batch; empty at the first.

        Raises:
            DataError: the stream was read on since then.
        """
        at = next(reversed(self._states), None) if at is None else at
        if self._stateful is None or at is None or (at == Position() and at not in self._states):
            return {}
        if at not in self._states:
            raise DataError(f"the stream's state at {at} is not kept: it was read on since then.")
        return deepcopy(self._states[at])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and (self._stateful is None or set(state) != _STATE):
            raise DataError(
                f"the state of a {type(self._stream).__name__} can't hold {sorted(state)}; resume with the data of the "
                f"checkpoint."
            )
        self._cursor = None
        self._states = {Position(state["epoch"], state["batch"]): deepcopy(dict(state))} if state else {}

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        """Give the global batches from `read.start` on: where the stream is or was, or the begin of an epoch."""
        share = _Share(self._edges(read.ranks), read, shared=self._shared)
        uneven = self._has_global_state and (share.num_microbatches or 0) % read.ranks
        if not share.num_items or uneven:
            raise ArgumentError(
                f"each of the {read.ranks} ranks must have micro-batches of each global batch, with `global_state` as "
                f"many as the others, but there are {share.num_microbatches}; make more of them, or pass `shared=True` "
                f"if all ranks read the same stream.",
                field="micro_batch_size",
            )
        cursor = self._cursor
        if cursor is None or cursor.position != read.start or cursor.share.key != share.key:
            cursor = self._cursor = self._started(share)
        cursor.share = share
        return self._generate(cursor, pins=read.pin_memory and can_pin())

    def close(self) -> None:
        self._cursor = None

    def _edges(self, ranks: int) -> Sequence[int]:
        if self._batched:
            return range(self._num_microbatches + 1)
        return self._cut(cast(int, self._global_batch_size), ranks)

    def _cut(self, num_samples: int, ranks: int) -> Sequence[int]:
        if self._micro_batch_size is None:
            return cut_evenly(num_samples, ranks)
        return cut_by_count(num_samples, self._micro_batch_size)

    def _started(self, share: _Share) -> _Cursor:
        start = share.read.start
        cursor = _Cursor(self._stream, self._setters, share)
        state = self._states.get(start)
        self._states = {start: state} if state else {}
        if start == Position() and not state:
            state = self._beginning  # where iterating a stream in the midst goes on from there
            if self._stateful is not None and not state:
                self._beginning = self._first_state(cursor)
        if state:
            self._resume(cursor, state)
        elif start.batch and self.positions == "last":
            raise DataError(
                f"the stream cannot start at {start} without a state; load the state that was saved with that "
                f"position, or start at an epoch's beginning."
            )
        elif start.batch:
            self._notice = (
                f"the stream can't go to batch {start.batch} of epoch {start.epoch} and begins that epoch again, as it "
                f"has no `state_dict`; torchdata's StatefulDataLoader goes on exactly."
            )
        return cursor

    def _first_state(self, cursor: _Cursor) -> dict[str, Any]:
        with undisturbed():
            cursor.set_epoch(0)
            try:
                cursor.state = cast(Stateful, self._stateful).state_dict()
            except Exception:  # noqa: BLE001 - some streams have a state only once they are read
                return {}
        return deepcopy(self._state_of(cursor, Position()))

    def _resume(self, cursor: _Cursor, state: Mapping[str, Any]) -> None:
        position = cursor.position
        cursor.state = state["stream"]
        with self._reading(position):
            number = position.batch * cursor.share.num_items
            cursor.begin(state["stream_epoch"], state=state["stream"], number=number)
        cursor.in_epoch = position.batch > 0
        cursor.waiting = state["waiting"] or (cursor.ahead is _END and self._has_global_state)
        if cursor.in_epoch and cursor.ahead is _END and not cursor.waiting:
            raise DataError(
                f"the stream gives nothing after batch {position.batch} of epoch {position.epoch}, but gave more "
                f"before the checkpoint; give the same stream, and check its `load_state_dict`."
            )

    def _generate(self, cursor: _Cursor, *, pins: bool) -> Iterator[GlobalBatch]:
        while cursor.in_epoch or self._begin_epoch(cursor):
            position, share = cursor.position, cursor.share
            if cursor.items is None:
                with self._reading(position):
                    cursor.items = cursor.take()
            pieces = self._pieces(cursor.items, share.first, share.read.ranks)
            num_here = sum(piece.num_samples for piece in pieces)
            mine = share.read.share(len(pieces)) if share.shared else range(len(pieces))
            microbatches = [pieces[one] for one in mine]
            for microbatch in microbatches:
                if not self._batched:
                    self._collate_in(microbatch, position)
                if pins:
                    microbatch.data = pin(microbatch.data)
            is_last = position.batch + 1 == self.limit_batches
            more = not cursor.waiting and cursor.ahead is not _END and not is_last
            num_samples, cursor.in_epoch = share.total(num_here, more=more)
            faults = self._faults(share, cursor.items)
            cursor.items = None
            cursor.waiting = not more
            cursor.position = position.after(ends_epoch=not cursor.in_epoch)
            if self._stateful is not None:
                before = self._states.get(position, {})
                self._states = {position: before, cursor.position: self._state_of(cursor, position)}
            yield GlobalBatch(
                position=position,
                following=cursor.position,
                microbatches=tuple([one for one in microbatches if one.num_samples]),
                num_microbatches=len(pieces) if share.num_microbatches is None else share.num_microbatches,
                num_samples=num_samples,
                ends_epoch=not cursor.in_epoch,
                faults=faults,
                parts=self._parts(pieces),
            )
            if is_last:  # a stream can't skip the rest of its epoch
                return

    def _state_of(self, cursor: _Cursor, last: Position) -> dict[str, Any]:
        epoch, batch = cursor.position
        waiting = cursor.in_epoch and cursor.waiting
        return {"epoch": epoch, "batch": batch, "stream_epoch": last.epoch, "stream": cursor.state, "waiting": waiting}

    def _begin_epoch(self, cursor: _Cursor) -> bool:
        with self._reading(cursor.position):
            can_iterate = cursor.begin_epoch()
        cursor.waiting = cursor.ahead is _END
        cursor.in_epoch = cursor.share.begin(cursor.position.epoch, gives=not cursor.waiting, over=not can_iterate)
        return cursor.in_epoch

    def _pieces(self, items: list[Any], first: int, ranks: int) -> list[Microbatch]:
        if self._batched:
            return [self._ready(first + place, item) for place, item in enumerate(items)]
        edges = self._cut(len(items), ranks if self._shared else 1) if items else []
        return [
            Microbatch(index=first + place, data=items[begin:end], num_samples=end - begin)
            for place, (begin, end) in enumerate(pairwise(edges))
        ]

    def _ready(self, index: int, item: Any, task: str = "") -> Microbatch:
        counted = self._samples_in is not _BY_SHAPE
        return Microbatch(index=index, data=item, num_samples=self._samples_in(item), task=task, counted=counted)

    def _collate_in(self, microbatch: Microbatch, position: Position) -> None:
        items = cast("list[Any]", microbatch.data)
        try:
            microbatch.data = self._collate(items)
        except Exception as error:
            raise DataError(
                f"collating batch {position.batch} of epoch {position.epoch} of the stream raised {clause(error)}; "
                f"make its samples alike, or pass a `collate` function that makes one batch of a list of them.",
                field="collate",
            ) from error
        microbatch.in_columns = self._collate is DEFAULT_COLLATE
        if not microbatch.in_columns:
            microbatch.num_samples = num_arrived(microbatch.data, items)

    def _parts(self, pieces: Sequence[Microbatch]) -> tuple[Part, ...]:
        return ()

    def _faults(self, share: _Share, items: list[object]) -> tuple[DataFault, ...]:
        notices = [self._notice]
        self._notice = ""
        if not self._compared and share.reads_the_same(items):
            notices.append(
                "all ranks have read the same first items from their streams, so every sample would count once for "
                "each rank; give each rank another part of the data, or pass `shared=True` (`data.shared = true`)."
            )
        self._compared = True
        return tuple(DataFault(message=message) for message in notices if message)

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

    All ranks iterate over the same updates, and each runs its share of an update's batches.

    Args:
        stream: gives one update after the other; iterating it again is the next epoch.
        samples_in: number of samples of a batch; by default dim 0 of its tensors.

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
        return {"kind": "updates", "stream": fingerprint_of(self._stream)}

    def _pieces(self, items: list[Any], first: int, ranks: int) -> list[Microbatch]:
        return [self._ready(place, one.data, one.task) for place, one in enumerate(batches_in(items[0]))]

    def _parts(self, pieces: Sequence[Microbatch]) -> tuple[Part, ...]:
        return tuple(Part(task=one.task, num_microbatches=1, num_samples=one.num_samples) for one in pieces)


def _check_stream(stream: object, *, gives_batches: bool) -> None:
    is_iterable = hasattr(stream, "__iter__") and not isinstance(stream, str | bytes | Mapping)
    size = cast(Any, stream).batch_size or 0 if isinstance(stream, DataLoader) else 0
    if not is_iterable or (size > 1 and not gives_batches):
        raise ArgumentError(
            f"`stream` must give samples when it is iterated, but is a {type(stream).__name__}; for the batches of a "
            f"loader pass `batched=True`, or give its dataset to `MapData`.",
            field="stream",
        )


def stream_epoch_setters(stream: object) -> list[Callable[[int], object]]:
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
