"""A group from which processes may be lost, and to which they may come, between two updates.

Before `join` a process is alone, and hears only itself. `join` asks the lighthouse who is there and connects with them;
`at`, at the beginning of each update, asks again and raises `Regroup` when others are there than before. Whoever then
calls `join` is in a new group, with a new rank. What of an interrupted update is done again is not known here.

Process 0 keeps the run folder, so it is in every group: while it is lost, the others wait for it to come back.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from socket import gethostname
from threading import Event
from time import monotonic
from typing import TypeVar, final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import ArgumentError, EvenstepError, LostRankError
from evenstep.internals import PrefixStore, Store, TCPStore
from evenstep.parallel.group import Group, Processes
from evenstep.parallel.lighthouse import Lighthouse, Peer

T = TypeVar("T")
_KEPT = "that may be lost must each hold the whole model"
_PAUSE_S, _CONNECT_S = 0.1, 5.0


class Regroup(LostRankError):
    """Others are there than before: the group must be formed anew. No error of the run."""


@final
class Alone(Group):
    """One of several that has not met the others yet: it hears from each of them what it says itself.

    >>> Alone(1, 3).gather("hello")
    ['hello', 'hello', 'hello']
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def gather(self, value: T) -> list[T]:
        return [value] * self.ranks

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        raise ArgumentError("the processes have not met yet, so they can't sum anything; call `train` first.")


@final
class Elastic(Group):
    """The processes that are there.

    Args:
        lighthouse: where to ask.
        timeout_s: the longest wait for another process, in seconds, in a word and for one to come.

    Attributes:
        count: of processes that were started.
        members: the numbers of those that are there, by name, in the order of their ranks. A rank changes with the
            group; a number is kept by whoever takes a lost process's place; a name is nobody else's.
    """

    def __init__(self, lighthouse: Lighthouse, *, timeout_s: float) -> None:
        seat = lighthouse.seat
        self._lighthouse, self._timeout_s = lighthouse, timeout_s
        self._now: Group = Alone(seat.number, seat.count)
        self.rank, self.ranks, self.count = seat.number, seat.count, seat.count
        self.members: dict[str, int] = {}
        self._formed: list[Peer] = []
        self._asked: list[Peer] | None = None
        self._tries, self._update = 0, 0
        self._has_begun, self._built_at = False, monotonic()
        self._asking_s = 0.0
        # the first process lets the others find each other; it takes part in every group
        host = "localhost" if "localhost" in seat.lighthouse else gethostname()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if seat.number == 0 else None
        self._store_at = f"{host}:{self._store.port}" if self._store else "-"

    @property
    def waited_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] - with that of the group of now
        return self._asking_s + self._now.waited_s

    def join(self, update: int) -> None:
        """Be in a group with all that are there.

        Args:
            update: how many this process has committed; below 0 if what it holds is not the state of any.

        Raises:
            LostRankError: process 0 did not come in time, or nobody can be reached.
        """
        self._update = max(update, 0)
        members, self._asked = self._asked, None
        if self._formed and members is None:
            self._tries += 1
        self._leave()
        until = monotonic() + self._timeout_s
        while True:
            members = members or self._ask(until)
            if _enough(members, self._lighthouse.seat.count) and self._connect(members):
                return
            if monotonic() > until:
                raise LostRankError(
                    f"process 0, which keeps the run folder, did not come within {self._timeout_s:g} s; there were "
                    f"{_numbers(members)}. Go on from the newest checkpoint."
                )
            members = None
            Event().wait(_PAUSE_S)

    def at(self, update: int) -> None:
        self._now.at(update)
        if not self._formed:
            return
        self._update = update - 1
        asked = self._ask(monotonic() + self._timeout_s)
        if _identity(asked) != _identity(self._formed):
            self._asked = asked
            raise Regroup(f"process {self._lighthouse.seat.number} finds others than before: {_numbers(asked)}")

    def _ask(self, until: float) -> list[Peer]:
        began = monotonic()
        members = self._lighthouse.ask(
            update=self._update,
            tries=self._tries,
            patient=not self._has_begun and monotonic() - self._built_at < self._timeout_s,
            store=self._store_at,
            # the lighthouse itself waits for so long for who is alive and does not ask
            timeout_s=max(until - monotonic(), 0.0) + self._timeout_s + _CONNECT_S,
        )
        self._asking_s += monotonic() - began
        return members

    def _connect(self, members: list[Peer]) -> bool:
        """Form the group of `members`; False if one of them was lost meanwhile."""
        rank = next(place for place, one in enumerate(members) if one.name == self._lighthouse.name)
        try:
            store = PrefixStore(_identity(members), self._store or _reached(members[0].store))
            store.set(f"here {rank}", "")
            store.wait([f"here {other}" for other in range(len(members))], timedelta(seconds=_CONNECT_S))
            now = Processes.met(store, rank=rank, ranks=len(members), timeout_s=self._timeout_s)
        except (EvenstepError, RuntimeError) as error:
            # whoever was lost is not in the next answer, and who was slow comes then
            logging.getLogger(__name__).debug("no group of %s: %s", _numbers(members), error)
            self._tries += 1
            return False
        self._now, self._formed, self._has_begun = now, members, True
        self.rank, self.ranks = rank, len(members)
        self.members = {one.name: one.number for one in members}
        return True

    def _leave(self) -> None:
        if self._formed:
            self._formed = []
            self._now.close()
            self._now = Alone(self.rank, self.ranks)

    def close(self) -> None:
        self._leave()
        self._lighthouse.close()

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return self._now.sum_floats(values)

    def gather(self, value: T) -> list[T]:
        return self._now.gather(value)

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        return self._now.sum(tensor)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._now.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._now.receive(tensor, rank)

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        return self._now.begin_send(tensor, rank, channel)

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        return self._now.begin_receive(tensor, rank, channel)

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        self._now.broadcast(tensors, rank)

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        raise ArgumentError(f"ranks {_KEPT}, but sharding gives each a part of the model; use `Ddp` or `Ordered`.")

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        raise ArgumentError(f"ranks {_KEPT}, but a pipeline gives each a part of the model; use `Ddp` or `Ordered`.")

    def interrupt(self, reason: str) -> None:
        self._now.interrupt(reason)

    def meet(self, value: T) -> list[T]:
        """Who is there is found out by `join`, where this process meets the others again."""
        if self.ranks > 1:
            raise Regroup(f"process {self._lighthouse.seat.number} has broken off what all did")
        return [value]

    def where(self) -> str:
        return self._now.where()

    def recorded(self) -> list[str]:
        return self._now.recorded()


def _enough(members: list[Peer], count: int) -> bool:
    """Whether these are to form a group; all of them get the same answer.

    >>> one = Peer(number=0, name="a", update=0, tries=0, patient=True, store="")
    >>> _enough([one], 2), _enough([one], 1)
    (False, True)
    """
    numbers = {one.number for one in members}
    alike = len(numbers) == len(members)  # a process that was replaced may still be in the answer
    return alike and 0 in numbers and (len(numbers) == count or not all(one.patient for one in members))


def _identity(members: list[Peer]) -> str:
    """A word for this group, which no other group has: whoever was in one before has tried once more."""
    return sha256(repr([(one.name, one.tries) for one in members]).encode()).hexdigest()[:16]


def _reached(address: str) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))


def _numbers(members: list[Peer]) -> str:
    return f"process {', '.join(str(one.number) for one in members)}" if members else "none"
