"""Work of ranks that write or read one checkpoint together: an error on one rank is raised on all."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Protocol, TypeVar, cast, final

from evenstep.errors import CheckpointError

T = TypeVar("T")
TALK_EVERY_S = 1.0
"""How often ranks exchange messages while they wait, so that none of them is taken for lost."""


class RankGroup(Protocol):
    """A group of processes, such as `evenstep.parallel.Group`."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def gather(self, value: T) -> list[T]:
        """Values of all ranks, by rank."""
        ...


@final
class SingleRank:
    """A group of one process."""

    rank = 0
    ranks = 1

    def gather(self, value: T) -> list[T]:
        return [value]


ALONE = SingleRank()


def together(group: RankGroup, act: Callable[[], T]) -> list[T]:
    """Call `act`, which does not wait for others, on every rank; gives the results of all, by rank.

    If it raised on one, all others raise a CheckpointError that names that rank, of the same class if it is one.
    """
    result, raised = None, None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have it
        raised = error
    kind = type(raised) if isinstance(raised, CheckpointError) else CheckpointError
    everybody = group.gather((result, "" if raised is None else str(raised) or type(raised).__name__, kind))
    if raised is not None:
        raise raised
    for rank, (_, fault, their_kind) in enumerate(everybody):
        if fault:
            raise their_kind(f"on rank {rank} of {group.ranks}: {fault}")
    return [cast("T", theirs) for theirs, _, _ in everybody]


def on_all_ranks(group: RankGroup, act: Callable[[], T]) -> T:
    """As `together`, but gives only this rank's result, which need not be picklable."""
    own: list[T] = []
    together(group, lambda: own.append(act()))
    return own[0]


def ended_on_all(group: RankGroup, act: Callable[[], T]) -> "Future[T]":
    """Call `act` in a thread, wait until it has ended on all ranks, however long it takes; gives its future here."""
    job = in_background(act)
    while not all(group.gather(not wait([job], TALK_EVERY_S).not_done)):
        pass
    return job


def in_background(act: Callable[[], T]) -> "Future[T]":
    """Call `act` in a daemon thread, so that a disk that hangs does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by `result()`
            future.set_exception(error)

    Thread(target=run, name="evenstep-save", daemon=True).start()
    return future
