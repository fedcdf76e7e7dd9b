"""The processes that write or read one checkpoint together, as the little that this package needs of them.

Whatever goes wrong on one rank goes wrong on all: a fault is told to everybody before anybody goes on. How ranks talk
is not known here; `evenstep.parallel.Group` is one way.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Protocol, TypeVar, cast, final

from evenstep.checkpoint.damage import UnreadableError
from evenstep.errors import CheckpointError

T = TypeVar("T")
TALK_EVERY_S = 1.0
"""How often ranks that wait for each other's work say that they do, so that nobody takes them for lost."""


class RankGroup(Protocol):
    """A group of processes, of which this is number `rank` of `ranks`."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank."""
        ...


@final
class SingleRank:
    """A group of one process.

    >>> SingleRank().gather("hello")
    ['hello']
    """

    rank = 0
    ranks = 1

    def gather(self, value: T) -> list[T]:
        return [value]


ALONE = SingleRank()


def together(group: RankGroup, act: Callable[[], T]) -> list[T]:
    """Do something on every rank; gives everybody's result, by rank, or raises on all if it raised on any.

    Args:
        group: all of which call this.
        act: what this rank does; it may not wait for the others.

    Raises:
        Exception: what `act` raised, on the ranks where it did.
        CheckpointError: on the others, an UnreadableError if it was one; it names the first of those ranks.
    """
    result, raised = None, None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised again below, once the others know
        raised = error
    kind = UnreadableError if isinstance(raised, UnreadableError) else CheckpointError
    told = group.gather((result, "" if raised is None else str(raised) or type(raised).__name__, kind))
    if raised is not None:
        raise raised
    for rank, (_, fault, their_kind) in enumerate(told):
        if fault:
            raise their_kind(f"on rank {rank} of {group.ranks}: {fault}")
    return [cast("T", theirs) for theirs, _, _ in told]


def on_all_ranks(group: RankGroup, act: Callable[[], T]) -> T:
    """The same, but gives only this rank's result, which need not be such as can be sent."""
    own: list[T] = []
    together(group, lambda: own.append(act()))
    return own[0]


def patiently(group: RankGroup, act: Callable[[], T]) -> list[T]:
    """The same as `together`, of what may take longer than ranks wait for each other."""
    return together(group, ended_on_all(group, act).result)


def ended_on_all(group: RankGroup, act: Callable[[], T]) -> "Future[T]":
    """Do something in a thread, while ranks keep talking; gives how it ended here, when it has ended on all of them."""
    job = in_background(act)
    while not all(group.gather(not wait([job], TALK_EVERY_S).not_done)):
        pass
    return job


def in_background(act: Callable[[], T]) -> "Future[T]":
    """Do something in a thread, which does not keep the process from ending: a disk may hang."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            future.set_exception(error)

    Thread(target=run, name="evenstep-save", daemon=True).start()
    return future
