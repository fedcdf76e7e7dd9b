"""A group whose processes may be lost, and come back, between two updates.

Process 0 keeps the run folder, so it is in every group: while it is lost, the others wait for it.
"""

import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from socket import gethostname
from time import monotonic, sleep
from typing import Any, TypeVar, final

from torch.distributed.device_mesh import DeviceMesh

from evenstep.contrib.elastic.lighthouse import SILENT_S, Lighthouse, Peer
from evenstep.errors import ArgumentError, EvenstepError, LostRankError, ReplicaError
from evenstep.internals import TCPStore
from evenstep.parallel.group import Group
from evenstep.parallel.processes import Processes
from evenstep.parallel.rank_info import RankInfo

T = TypeVar("T")
_WHOLE = "ranks that may be lost must each hold the whole model; use `Ddp`, no shards and no pipeline."
_PAUSE_S = 0.1  # between two tries to form a group
_MEETING_S = 5.0  # for processes that the lighthouse has just seen


@final
class Alone(Group):
    """One of several processes before they have met: each value that it gathers is its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def gather(self, value: T) -> list[T]:
        return [value] * self.ranks

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        raise ArgumentError("the processes have not met yet and can't sum; call `train` first.")


@final
class Elastic(Group):
    """The processes that are alive.

    Args:
        timeout_s: the longest wait for another process, in seconds, in a collective and to join.

    Attributes:
        count: number of processes that were started.
        members: numbers of the processes in the group, by unique name, in the order of their ranks. A process that
            replaces a lost one has its number.
    """

    can_change = True

    def __init__(self, lighthouse: Lighthouse, *, timeout_s: float) -> None:
        mine = lighthouse.place
        self._lighthouse, self._timeout_s = lighthouse, timeout_s
        self._now: Alone | Processes = Alone(mine.number, mine.count)
        self.rank, self.ranks, self.count = mine.number, mine.count, mine.count
        self.members: dict[str, int] = {}
        self._formed: list[Peer] = []
        self._asked: list[Peer] = []  # the members of the next group, if they are known
        self._tries = self._update = 0
        self._has_begun, self._built_at = False, monotonic()
        # the first process lets the others find each other; it takes part in every group
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if mine.number == 0 else None
        host = "localhost" if "localhost" in mine.lighthouse else gethostname()
        self._store_at = f"{host}:{self._store.port}" if self._store else "-"

    def join(self, update: int) -> None:
        """Form a group of all processes that are alive.

        Args:
            update: number of updates that this process has committed; below 0 if it holds no consistent state.
        """
        self._update = max(update, 0)
        members, self._asked = self._asked, []
        if self._formed and not members:
            self._tries += 1
        self._leave(waits=False)
        until = monotonic() + self._timeout_s
        while True:
            members = members or self._ask(until)
            if _enough(members, self.count) and self._connect(members):
                return
            if monotonic() > until:
                raise LostRankError(
                    f"process 0, which keeps the run folder, did not join within {self._timeout_s:g} s, only process "
                    f"{_numbers(members)}; resume from the newest checkpoint."
                )
            members = []
            sleep(_PAUSE_S)

    def at(self, update: int) -> None:
        self._now.at(update)
        if not self._formed:
            return
        self._update = update - 1
        asked = self._ask(monotonic() + self._timeout_s)
        if _attempt(asked) != _attempt(self._formed):
            self._asked = asked
            raise LostRankError(f"the group has changed: now it is process {_numbers(asked)}")

    def _ask(self, until: float) -> list[Peer]:
        return self._lighthouse.ask(
            update=self._update,
            tries=self._tries,
            patient=not self._has_begun and monotonic() - self._built_at < self._timeout_s,
            store=self._store_at,
            # the lighthouse itself waits for so long for who is alive and does not ask
            timeout_s=max(until - monotonic(), 0.0) + self._timeout_s + _MEETING_S,
        )

    def _connect(self, members: list[Peer]) -> bool:
        host, _, port = members[0].store.rpartition(":")
        info = RankInfo(
            rank=[one.name for one in members].index(self._lighthouse.name),
            ranks=len(members),
            address="localhost" if self._store else host,  # a machine's own name need not lead back to it
            port=int(port),
            store_is_served=True,
            attempt=_attempt(members),
        )
        try:
            now = Processes("cpu", info=info, timeout_s=self._timeout_s, meeting_s=_MEETING_S, answer_s=SILENT_S)
        except (EvenstepError, RuntimeError) as error:
            if isinstance(error, ReplicaError) and not self._has_begun:
                raise
            # a lost process is not in the next answer, and a slow one is
            logging.getLogger(__name__).debug("no group of process %s: %s", _numbers(members), error)
            self._tries += 1
            return False
        self._now, self._formed, self._has_begun = now, members, True
        self.rank, self.ranks = now.rank, now.ranks
        self.members = {one.name: one.number for one in members}
        return True

    def _leave(self, *, waits: bool) -> None:
        if isinstance(self._now, Processes):
            self._formed = []
            self._now.close(waits=waits)
            self._now = Alone(self.rank, self.ranks)

    def close(self) -> None:
        self._leave(waits=True)
        self._lighthouse.close()

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        raise ArgumentError(_WHOLE)

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        raise ArgumentError(_WHOLE)


def _forwarding(name: str) -> Callable[..., Any]:
    def call(self: Elastic, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._now, name)(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return call


_FORWARDED = (
    "begin_receive begin_send begin_work broadcast explained fail failure gather interrupt interrupted meet sum "
    "sum_floats"
)  # not `go_on`: after an error, `train` joins again
for _name in _FORWARDED.split():
    setattr(Elastic, _name, _forwarding(_name))


def _enough(members: list[Peer], count: int) -> bool:
    numbers = {one.number for one in members}
    alike = len(numbers) == len(members)  # a process that was replaced may still be in the answer
    return alike and 0 in numbers and (len(numbers) == count or not all(one.patient for one in members))


def _attempt(members: list[Peer]) -> int:
    # A number that no other group has: a member of an earlier group has tried once more.
    return int(sha256(repr([(one.name, one.tries) for one in members]).encode()).hexdigest()[:16], 16)


def _numbers(members: list[Peer]) -> str:
    return ", ".join(str(one.number) for one in members) or "none"
