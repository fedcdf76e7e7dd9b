"""Global batches of an iterable of samples, of ready-made batches, or of whole updates.

A stream is read one item ahead, because only that tells whether an epoch has ended. It resumes by its own state.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, Literal, cast, final
from zlib import crc32

from torch.utils.data import DataLoader

from evenstep.arguments import require_whole
from evenstep.data.batch import (
    JSON,
    Batch,
    Data,
    DataFault,
    GlobalBatch,
    Microbatch,
    Part,
    Position,
    ReadOptions,
    batches_in,
)
from evenstep.data.batching import cut_by_count
from evenstep.data.dataset import fingerprint_of, with_set_epoch
from evenstep.data.loader import DEFAULT_COLLATE, Collate
from evenstep.data.seeding import generator_states, seed_generators, undisturbed
from evenstep.data.split import num_arrived, samples_in
from evenstep.data.tree import can_pin, pin
from evenstep.errors import ArgumentError, DataError
from evenstep.keys import key, mix

_END = object()
_BY_SHAPE = samples_in
_ORDER = attrgetter("seed", "rank", "ranks", "blocks")  # that choose the items which a reader takes
_WATCHED = 4  # first reads; if they draw nothing, no more is seeded: 45 instead of 380 µs for a batch of 8 numbers


@final
class _Cursor:
    """Place of this rank in its stream, which is read one item ahead; `num_items` are in a global batch.

    Attributes:
        state: of the stream, before the item ahead.
        is_pending: the next epoch begins at the state.
        in_epoch: the ranks have agreed on the epoch of the position.
    """

    def __init__(self, stream: Any, read: ReadOptions, *, shared: bool, num_items: int) -> None:
        self.read = read
        self.shared = shared
        self.position = read.start
        self.ahead: object = _END
        self.state: dict[str, Any] | None = None
        self.is_pending = False
        self.in_epoch = False
        self._num_items = num_items
        self._stream = stream
        self._iterator: Any = None
        self._epoch_key = 0
        self._num_still = 0  # first reads that have drawn nothing; below 0 if one has

    def iterate(self, state: dict[str, Any] | None = None) -> None:
        """Iterate the stream from the beginning of the epoch, or from a state in it."""
        with undisturbed():
            self.set_epoch()
            if state is not None:
                self._stream.load_state_dict(deepcopy(state))
            self._iterator = iter(self._stream)
        self._look_ahead(self.position.batch)

    def begin_epoch(self) -> bool:
        """Iterate the stream for an epoch; False for a used up generator."""
        if self.is_pending:
            self.is_pending = False
            self.iterate(self.state)
            if self.ahead is not _END:  # else it is the state at the end of the epoch before
                return True
        before = self._iterator
        self.iterate()
        return self.ahead is not _END or before is None or self._iterator is not before

    def take(self) -> list[Any]:
        """The items of a global batch; none where the stream has ended."""
        if self.ahead is _END:
            return []
        with self._seeded(2 * self.position.batch + 1):
            items = [self.ahead, *islice(self._iterator, self._num_items - 1)]
        if _is_stateful(self._stream):  # before looking ahead: a resumed run must be given that item
            self.state = deepcopy(self._stream.state_dict())
        self.ahead = _END
        if len(items) == self._num_items:
            self._look_ahead(self.position.batch + 1)
        return items

    def set_epoch(self) -> None:
        rank = 0 if self.shared else self.read.rank
        self._epoch_key = key(self.read.seed, "stream", self.position.epoch, rank)
        seed_generators(self._epoch_key)  # also for `iter`, in which a loader draws the order of its epoch
        for one in with_set_epoch(self._stream):
            one.set_epoch(self.position.epoch)

    def _look_ahead(self, batch: int) -> None:
        with self._seeded(2 * batch):
            self.ahead = next(self._iterator, _END)

    @contextmanager
    def _seeded(self, number: int) -> Generator[None]:
        if self._num_still == _WATCHED:
            yield
            return
        with undisturbed():
            seed_generators(mix(self._epoch_key ^ number))
            before = generator_states() if self._num_still >= 0 else None
            yield
            if before is not None:
                self._num_still = self._num_still + 1 if generator_states() == before else -1


class StreamData(Data):
    """Global batches of an iterable; each epoch iterates it again, so a run on a generator ends with it.

    Random numbers from the global generators are keyed by (seed, epoch, batch, rank). With `state_dict` and
    `load_state_dict`, as torchdata's `StatefulDataLoader` has them, a run resumes exactly; else a resume begins its
    epoch again. Each rank reads its own stream, and an epoch ends when the longest has ended. Such a run resumes on the
    same number of ranks, or on any if the stream has `global_state = True`: its state counts the items of all ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: most samples of a micro-batch; None divides each global batch among the ranks.
        collate: makes the batch of a list of samples.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: number of samples of a ready-made batch; by default dim 0 of its tensors.
        shared: whether all ranks read the same stream, and each uses its part of every batch.
        limit_batches: number of global batches after which the data end, to try things out; None for no limit.

    >>> batches = StreamData(range(10), global_batch_size=4).batches(ReadOptions(seed=1))
    >>> [next(batches).num_samples for _ in range(4)]
    [4, 4, 2, 4]
    """

    _gives_updates = False

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
        self._is_stateful = _is_stateful(stream)
        self._has_global_state = bool(getattr(stream, "global_state", False))
        self._cursor: _Cursor | None = None  # None while a batch is read
        # before and after the last global batch, which may not be committed; the newest last
        self._states: dict[Position, dict[str, Any]] = {}
        self._beginning: dict[str, Any] | None = None  # of the stream, before it was read
        self._notices: list[str] = []
        self._is_compared = shared  # the first items of the ranks

    @property
    def scope(self) -> Literal["run", "rank"]:
        return "run" if self._shared or self._has_global_state or self.positions == "epochs" else "rank"

    @property
    def positions(self) -> Literal["last", "epochs"]:
        return "last" if self._is_stateful and self.limit_batches is None else "epochs"

    @property
    def moving_stream(self) -> object:
        """The stream, if a second reader would move it."""
        return self._stream if self._is_stateful or isinstance(self._stream, Iterator) else None

    def num_batches(self, epoch: int, *, seed: int) -> None:
        """None: only reading the stream tells."""

    def fingerprint(self) -> dict[str, JSON]:
        """The sizes, and the stream's own `fingerprint`."""
        return {
            "kind": type(self).__name__,
            "global_batch_size": self._global_batch_size,
            "batched": self._batched,
            "num_microbatches": self._num_microbatches,
            "shared": self._shared,
            "stream": fingerprint_of(self._stream),
            "cut": {"micro_batch_size": self._micro_batch_size},
        }

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        """State of the stream at the position before or after the last global batch; empty at the first."""
        at = next(reversed(self._states), None) if at is None else at
        if not self._is_stateful or at is None or (at == Position() and at not in self._states):
            return {}
        if at not in self._states:
            raise DataError(f"the stream's state at {at} is not kept: it was read on since then.")
        return deepcopy(self._states[at])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor = None
        self._states = {Position(state["epoch"], state["batch"]): deepcopy(dict(state))} if state else {}

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        """Give the global batches from `read.start` on: where the stream is or was, or the begin of an epoch."""
        shared = self._shared or read.ranks == 1
        edges = range(self._num_microbatches + 1) if self._batched else self._cut(self._global_batch_size, read.ranks)
        count = len(edges) - 1
        mine = range(count) if shared else read.share(count)
        if not mine or (self._has_global_state and not shared and count % read.ranks):
            raise ArgumentError(
                f"each of the {read.ranks} ranks must have micro-batches of each global batch, with `global_state` as "
                f"many as the others, but there are {count}; make more of them, or pass `shared=True` if all ranks "
                f"read the same stream.",
                field="micro_batch_size",
            )
        cursor = self._cursor
        if cursor is None or cursor.position != read.start or _ORDER(cursor.read) != _ORDER(read):
            cursor = _Cursor(self._stream, read, shared=shared, num_items=edges[mine.stop] - edges[mine.start])
            self._start(cursor)
        cursor.read = read
        self._cursor = cursor
        return self._generate(cursor, mine.start, None if shared else count)

    def close(self) -> None:
        self._cursor = None

    def _cut(self, num_samples: int | None, ranks: int) -> Sequence[int]:
        return cut_by_count(cast("int", num_samples), self._micro_batch_size, ranks=ranks)

    def _start(self, cursor: _Cursor) -> None:
        start = cursor.position
        saved = self._states.get(start)
        self._states = {start: saved} if saved else {}
        if saved:
            cursor.state = saved["stream"]
            cursor.in_epoch = start.batch > 0
            cursor.is_pending = saved["waiting"] or not cursor.in_epoch
            if cursor.is_pending:
                return
            cursor.iterate(cursor.state)
            if cursor.ahead is _END and not self._has_global_state:
                raise DataError(
                    f"the stream gives nothing after batch {start.batch} of epoch {start.epoch}, but gave more before "
                    f"the checkpoint; give the same stream, and check its `load_state_dict`."
                )
        elif self._is_stateful and start == Position():
            cursor.is_pending = self._beginning is not None  # iterating a stream in the midst goes on from there
            if self._beginning is None:
                self._beginning = self._first_state(cursor)
            cursor.state = self._beginning
        elif start.batch and self.positions == "last":
            raise DataError(
                f"the stream cannot start at {start} without a state; load the state that was saved with that "
                f"position, or start at an epoch's beginning."
            )
        elif start.batch:
            self._notices.append(
                f"the stream can't go to batch {start.batch} of epoch {start.epoch} and begins that epoch again, as it "
                f"has no `state_dict`; torchdata's StatefulDataLoader goes on exactly."
            )

    def _first_state(self, cursor: _Cursor) -> dict[str, Any] | None:
        with undisturbed():
            cursor.set_epoch()
            try:
                return deepcopy(cast("Any", self._stream).state_dict())
            except Exception:  # noqa: BLE001 - some streams have a state only once they are read
                return None

    def _generate(self, cursor: _Cursor, first: int, num_microbatches: int | None) -> Iterator[GlobalBatch]:
        read = cursor.read
        pins = read.pin_memory and can_pin()
        while cursor.in_epoch or self._begin_epoch(cursor):
            self._cursor = None
            position = cursor.position
            pieces = self._pieces(cursor.take(), first, read.ranks)
            microbatches = [pieces[one] for one in read.share(len(pieces))] if cursor.shared else pieces
            num_samples = sum(piece.num_samples for piece in pieces)  # also those that `collate` leaves out
            for microbatch in microbatches:
                if not self._batched:
                    samples = cast("list[Any]", microbatch.data)
                    microbatch.data = self._collate(samples)
                    if not microbatch.in_columns:
                        microbatch.num_samples = num_arrived(microbatch.data, samples)
                if pins:
                    microbatch.data = pin(microbatch.data)
            is_last = position.batch + 1 == self.limit_batches
            if is_last:
                cursor.ahead = _END
            num_samples, cursor.in_epoch = _agreed(cursor, num_samples)
            cursor.position = position.after(ends_epoch=not cursor.in_epoch)
            if self._is_stateful:
                waiting = cursor.in_epoch and cursor.ahead is _END
                after = {**cursor.position._asdict(), "stream": cursor.state, "waiting": waiting}
                self._states = {position: self._states.get(position, {}), cursor.position: after}
            batch = GlobalBatch(
                position=position,
                following=cursor.position,
                microbatches=tuple([one for one in microbatches if one.num_samples]),
                num_microbatches=num_microbatches or len(pieces),
                num_samples=num_samples,
                faults=tuple([DataFault(message=notice) for notice in self._notices]),
                parts=tuple([_part_of(piece) for piece in pieces if self._gives_updates]),
            )
            self._notices.clear()
            self._cursor = cursor
            yield batch
            if is_last:  # a stream can't skip the rest of its epoch
                return

    def _begin_epoch(self, cursor: _Cursor) -> bool:
        epoch = cursor.position.epoch
        can_iterate = cursor.begin_epoch()
        item = 0 if self._is_compared else crc32(repr(cursor.ahead).encode()) % 2**20  # its square is exact
        gives = cursor.ahead is not _END
        giving, ended, items, squares, ranks = cursor.read.total((gives, not can_iterate, item, item**2, 1))
        if ended == ranks:
            return False
        if ended or (cursor.shared and giving not in (0, ranks)):
            raise _differing(cursor, f"in epoch {epoch} the streams of {int(giving)} ranks give something")
        if not giving:
            raise DataError(
                f"the stream gave nothing in epoch {epoch}; check its source. A generator can be iterated only once."
            )
        if not self._is_compared and ranks > 1 and squares * ranks == items**2:
            self._notices.append(
                "all ranks have read the same first item from their streams, so every sample would count once for each "
                "rank; give each rank another part of the data, or pass `shared=True` (`data.shared = true`)."
            )
        self._is_compared = True
        cursor.in_epoch = True
        return True

    def _pieces(self, items: list[Any], first: int, ranks: int) -> list[Microbatch]:
        if self._batched:
            counted = self._samples_in is not _BY_SHAPE
            named = batches_in(items[0]) if self._gives_updates else [Batch(task="", data=item) for item in items]
            return [
                Microbatch(
                    index=index, data=one.data, num_samples=self._samples_in(one.data), task=one.task, counted=counted
                )
                for index, one in enumerate(named, start=first)
            ]
        edges = self._cut(len(items), ranks if self._shared else 1) if items else []
        in_columns = self._collate is DEFAULT_COLLATE
        return [
            Microbatch(index=index, data=items[begin:end], num_samples=end - begin, in_columns=in_columns)
            for index, (begin, end) in enumerate(pairwise(edges), start=first)
        ]


@final
class UpdateData(StreamData):
    """The updates of an iterable: a tuple of batches, or one batch; see `batches_in`.

    All ranks iterate over the same updates, and each runs its share of an update's batches. Iterating `stream` again
    is the next epoch; `samples_in` is as for `StreamData`.

    >>> data = UpdateData([((["a"], "class"), (["b", "c"], "box"))], samples_in=len)
    >>> batch = next(data.batches(ReadOptions(seed=1)))
    >>> [(one.index, one.task, one.data) for one in batch.microbatches], batch.num_samples
    ([(0, 'class', ['a']), (1, 'box', ['b', 'c'])], 3)
    """

    tasks = None
    _gives_updates = True

    def __init__(self, stream: Iterable[Any], *, samples_in: Callable[[Any], int] = samples_in) -> None:
        super().__init__(stream, batched=True, samples_in=samples_in, shared=True)


def _agreed(cursor: _Cursor, num_samples: int) -> tuple[int, bool]:
    """Samples of a global batch over all ranks, and whether any rank has more in this epoch."""
    more = cursor.ahead is not _END
    samples, having_more, squares, ranks = cursor.read.total((num_samples, more, num_samples**2, 1))
    if not cursor.shared:
        return int(samples), having_more > 0
    if squares * ranks != samples**2 or having_more not in (0, ranks):
        raise _differing(cursor, f"a global batch has {num_samples} samples here and {samples / ranks:g} on average")
    return num_samples, more


def _part_of(piece: Microbatch) -> Part:
    return Part(task=piece.task, num_microbatches=1, num_samples=piece.num_samples)


def _differing(cursor: _Cursor, found: str) -> DataError:
    must = "read the same stream" if cursor.shared else "read streams that begin anew alike"
    return DataError(f"all {cursor.read.ranks} ranks must {must}, but {found}; give each rank such a stream.")


def _is_stateful(stream: object) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _check_stream(stream: object, *, gives_batches: bool) -> None:
    loader: Any = stream if isinstance(stream, DataLoader) else None
    is_iterable = hasattr(stream, "__iter__") and not isinstance(stream, str | bytes | Mapping)
    if not is_iterable or (loader is not None and (loader.batch_size or 0) > 1 and not gives_batches):
        raise ArgumentError(
            f"`stream` must give samples when it is iterated, but is a {type(stream).__name__}; for the batches of a "
            f"loader pass `batched=True`, or give its dataset to `MapData`.",
            field="stream",
        )
    if loader is not None and loader.persistent_workers and with_set_epoch(loader.dataset):
        raise ArgumentError(
            "a DataLoader with `persistent_workers=True` never tells its workers of a new epoch, but its dataset has "
            "`set_epoch`; turn `persistent_workers` off, or give the dataset to `MapData`.",
            field="stream",
        )
