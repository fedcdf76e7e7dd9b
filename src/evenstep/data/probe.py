"""Tries, before a run, whether a stream resumes exactly: it is read, sent back, and read again.

Many streams have a state that does not say all: a shuffle buffer is refilled, a loader forgets its generator. That
shows in a few items, and in the first ones of the next epoch. What only shows later (the state of workers after hours,
a file that changes) it can't find.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, cast

from evenstep.data.alike import alike
from evenstep.data.stream import Stateful
from evenstep.data.stream_reader import END, Reader
from evenstep.errors import DataError, clause

_BEFORE, _AFTER = 2, 6  # items that are read before the state is taken, and after


def probe(stream: Iterable[Any], set_epoch: Sequence[Callable[[int], object]]) -> str:
    """Whether `stream` goes on from a state of it with what came after; it is left at its beginning.

    Args:
        stream: with `state_dict` and `load_state_dict`, not yet read.
        set_epoch: what is told of a new epoch.

    Returns:
        "", or why it could not be tried.

    Raises:
        DataError: it does not.
    """
    name = type(stream).__name__
    try:
        beginning = deepcopy(cast(Stateful, stream).state_dict())
    except Exception as error:  # noqa: BLE001 - it may not know where it is before it is read; then a copy is tried
        try:
            copied = deepcopy(stream)
        except Exception:  # noqa: BLE001 - said
            return (
                f"whether the stream, a {name}, resumes exactly could not be tried: before it is read, its "
                f"`state_dict()` raises {clause(error)}, and it can't be copied."
            )
        _compare(Reader(copied, [], seed=0, rank=0), name)
        return ""
    reader = Reader(stream, set_epoch, seed=0, rank=0)
    first = _compare(reader, name)
    try:
        reader.go_to(beginning, epoch=0, number=0)
        again, _ = _taken(reader, _BEFORE)
        cast(Stateful, stream).load_state_dict(deepcopy(beginning))
    except Exception as error:
        raise _fails(name, error) from error
    if not alike(first, again):
        raise _inexact(name, "put back to its beginning, it does not begin with the same items")
    return ""


def _compare(reader: Reader, name: str) -> list[object]:
    """Raise unless what follows a state is the same again; gives the items before it."""
    try:
        reader.begin(0)
        first, state = _taken(reader, _BEFORE)
        rest, _ = _taken(reader, _AFTER)
        reader.begin(1)
        following, _ = _taken(reader, _AFTER)
        if state is None:  # it has nothing
            return first
        reader.go_to(state, epoch=0, number=len(first))
        rest_again, _ = _taken(reader, _AFTER)
        reader.begin(1)
        following_again, _ = _taken(reader, _AFTER)
    except Exception as error:
        raise _fails(name, error) from error
    if not alike(rest, rest_again):
        raise _inexact(name, f"of the items after the first {len(first)} it gave others when it was sent back there")
    if not alike(following, following_again):
        raise _inexact(name, "after it was sent back to the midst of an epoch, the next epoch began with other items")
    return first


def _taken(reader: Reader, count: int) -> tuple[list[object], dict[str, Any] | None]:
    """The next items, as many as there are up to `count`, and the stream's state after them."""
    if reader.ahead is END:
        return [], None
    items, state = reader.take(count)
    if reader.failure is not None:
        raise reader.failure
    return items, state


def _inexact(name: str, what: str) -> DataError:
    return DataError(
        f"a run on this stream, a {name}, would not resume exactly: {what}. Its state does not say all (a shuffle "
        "buffer's content, a generator that it shares, random numbers drawn in workers). Let its order and its random "
        "numbers follow from seed and epoch, and its state say the rest; give a dataset with a length to `MapData`, "
        "which shuffles and resumes exactly; or pass `exact_resume=False`, in a run file `data.exact_resume = false`, "
        "if other samples after a resume are meant, or save nothing."
    )


def _fails(name: str, error: Exception) -> DataError:
    return DataError(
        f"trying whether the stream, a {name}, resumes exactly raised {clause(error)}; correct the "
        "stream, or pass `exact_resume=False`, in a run file `data.exact_resume = false`, to read it without trying."
    )
