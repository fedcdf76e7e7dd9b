"""Streams: their state, `set_epoch`, and a reader that is one item ahead.

One item ahead, because only that tells whether an epoch has ended. An error of the stream leaves as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Protocol, cast, final, runtime_checkable

from torch.utils.data import DataLoader

from evenstep.data.dataset import Told, epoch_setters
from evenstep.data.seeding import global_states, seed_generators, undisturbed
from evenstep.errors import ArgumentError
from evenstep.keys import key, mix

END = object()
_UNCHANGING = frozenset({int, float, str, bool, bytes, type(None)})
_WATCHED = 4  # first items of a reader, after which a stream that has drawn nothing is taken to draw nothing


@runtime_checkable
class Stateful(Protocol):
    """A stream that can say where it is and go there; torchdata's `StatefulDataLoader` is one.

    After `load_state_dict(state)` the next `iter()` must go on with the item after the last that was given when
    `state_dict()` gave `state`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def check_stream(stream: object, *, gives_batches: bool) -> None:
    """Check that `stream` is something to iterate, whose items are what they are taken for.

    Args:
        gives_batches: whether its items may be batches of samples.
    """
    name = type(stream).__name__
    if isinstance(stream, str | bytes | Mapping) or not hasattr(stream, "__iter__"):
        raise ArgumentError(f"`stream` must give samples when it is iterated, but is a {name}.", field="stream")
    if not gives_batches and isinstance(stream, DataLoader) and (cast(Any, stream).batch_size or 0) > 1:
        size = cast(Any, stream).batch_size
        raise ArgumentError(
            f"`stream` must give samples, but this {name} gives batches of {size}; pass `batched=True`, or give its "
            "dataset to `MapData`.",
            field="stream",
        )


def stream_epoch_setters(stream: object) -> list[Callable[[int], object]]:
    setters = epoch_setters(stream)
    if setters or not isinstance(stream, DataLoader):
        return setters
    loader = cast(Any, stream)  # torch leaves the types of its samplers open
    of_dataset = epoch_setters(loader.dataset)
    if of_dataset and loader.persistent_workers:
        raise ArgumentError(
            "a DataLoader with `persistent_workers=True` never tells its workers of a new epoch, but its dataset has "
            "`set_epoch`; turn `persistent_workers` off, or give the dataset to `MapData`."
        )
    return of_dataset + epoch_setters(loader.sampler) + epoch_setters(loader.batch_sampler)


@final
class Reader:
    """A place in a stream.

    torch's, numpy's and Python's global generators are seeded from (seed, epoch, number of the item, rank) before each
    item, as long as the stream is not known to draw nothing from them; so what it draws for an item does not depend on
    what the model has drawn, nor on where the run was stopped.

    Args:
        rank: whose stream it is; 0 of one that all ranks read.

    Attributes:
        ahead: the next item; `END` where the epoch has ended, or none was begun.
        failure: what looking ahead has raised; due when that item is taken.
    """

    def __init__(
        self, stream: Iterable[Any], set_epoch: Sequence[Callable[[int], object]], *, seed: int, rank: int
    ) -> None:
        self._stream = stream
        self._stateful = stream if isinstance(stream, Stateful) else None
        self._set_epoch, self._told = set_epoch, Told(set_epoch)
        self._epoch = 0
        self._seed, self._rank = seed, rank
        self._iterator: Any = None  # once begun, of the stream's items
        self._epoch_key = 0
        self._number = 0  # of the item ahead, in its epoch
        self._draws = self._draws_nothing = False
        self._watched = 0
        self.ahead: object = END
        self.failure: Exception | None = None

    def begin(self, epoch: int) -> bool:
        """Begin an epoch, and look at its first item; False where the stream can be iterated only once, and was."""
        before = self._iterator
        with undisturbed():
            self._enter(epoch, number=0)
            self._iterator = iter(self._stream)
            self.ahead = self._next()
        return self.ahead is not END or before is None or self._iterator is not before

    def take(self, count: int) -> tuple[list[object], dict[str, Any] | None]:
        """The next items, as many as the epoch still has up to `count`, and the stream's state after them."""
        if self.failure is not None:
            raise self.failure
        if self._told.by_others:
            with undisturbed():
                self._tell()
        items = [self.ahead]
        with nullcontext() if self._draws_nothing else undisturbed():
            item: object = None
            # Not with islice: it calls iter() again, at which some iterators begin anew.
            while len(items) < count and (item := self._next()) is not END:
                items.append(item)
            # Taken before looking ahead: a run that resumes from it must be given the item that is looked at.
            state = self.state()
            try:
                self.ahead = END if item is END else self._next()
            except Exception as error:  # noqa: BLE001 - due with the next items: these are whole
                self.ahead, self.failure = None, error
        return items, state

    def state(self) -> dict[str, Any] | None:
        """A copy of the stream's state, which that can't change any more; None of one without."""
        if self._stateful is None:
            return None
        state = self._stateful.state_dict()
        if type(state) is dict and _UNCHANGING.issuperset(map(type, state.values())):
            return state.copy()  # most are a few counters, and one is taken in every update
        return deepcopy(state)

    def beginning(self) -> dict[str, Any] | None:
        """State of the stream before it is read; None if it has none yet."""
        with undisturbed():
            self._enter(0, number=0)
            try:
                return self.state()
            except Exception:  # noqa: BLE001 - some streams have a state only once they are read
                return None

    def go_to(self, state: dict[str, Any], *, epoch: int, number: int) -> None:
        """Put `state` into the stream, and look at the item after it, which is `number` of `epoch`."""
        stateful = cast(Stateful, self._stateful)
        self.failure = None
        with undisturbed():
            self._enter(epoch, number=number)
            stateful.load_state_dict(deepcopy(state))
            self._iterator = iter(self._stream)
            self.ahead = self._next()

    def _enter(self, epoch: int, *, number: int) -> None:
        self._epoch_key = key(self._seed, "stream", epoch, self._rank)
        self._epoch, self._number = epoch, number - 1
        # `iter` of a loader draws the order of its epoch, and what its workers begin with.
        self._tell()

    def _tell(self) -> None:
        seed_generators(self._epoch_key)
        for set_epoch in self._set_epoch:
            set_epoch(self._epoch)
        self._told.remember()

    def _next(self) -> object:
        iterator = self._iterator
        self._number += 1
        if self._draws_nothing:
            return next(iterator, END)
        seed_generators(mix(self._epoch_key ^ self._number))
        if self._draws:
            return next(iterator, END)
        self._watched += 1
        before = global_states()
        item = next(iterator, END)
        self._draws = global_states() != before
        self._draws_nothing = self._watched >= _WATCHED and not self._draws
        return item
