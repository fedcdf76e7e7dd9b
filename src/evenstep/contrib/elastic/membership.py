"""A group whose processes may be lost, and come back, between two updates.

The lighthouse of torchft lists the processes that are alive, equal for all that ask. Process 0 keeps the run folder, so
it is in every group: while it is lost, the others wait for it.
"""

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from socket import gethostname
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, TypeVar, final

from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import ArgumentError, EvenstepError, LostRankError, MissingExtraError
from evenstep.internals import TCPStore
from evenstep.parallel.group import Group
from evenstep.parallel.processes import Processes
from evenstep.parallel.rank_info import RankInfo

T = TypeVar("T")
_HEARTBEAT_S = 0.1
_SILENT_S = 2.0  # a process that has sent no heartbeat for so long is lost
_ANSWER_S = 5.0
_PAUSE_S = 0.1  # between two tries to form a group
_MEETING_S = 5.0  # for processes that the lighthouse has just seen
_ERRORS = (RuntimeError, ValueError, TimeoutError)  # of torchft
_WHOLE = "ranks that may be lost must each hold the whole model; use `Ddp`, no shards and no pipeline."


def coordination() -> Any:
    if find_spec("torchft") is None:
        raise MissingExtraError("torchft", "torchft")
    os.environ.setdefault("RUST_LOG", "warn")  # read once, when it is imported
    return import_module("torchft.coordination")


@contextmanager
def lighthouse(timeout_s: float) -> Generator[str]:
    """Serve a lighthouse, which waits up to `timeout_s` for a process that is alive and does not ask; its address."""
    server: Any = coordination().LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * timeout_s),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * _SILENT_S),
    )
    try:  # a machine's own name need not lead back to it
        yield f"http://localhost:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One process that has asked."""

    number: int
    name: str  # unique, also beside a process that takes the same place later
    tries: int  # number of groups that it has been in, or tried to form
    patient: bool  # prefers to wait for processes that have not come
    store: str  # address where the first process of a group lets the others rendezvous


@final
class Lighthouse:
    """One process's access to the lighthouse; alive from the first question until `close`."""

    def __init__(self, place: RankInfo) -> None:
        self.place = place
        self.name = f"{place.rank:06d}:{gethostname()}:{os.getpid()}:{monotonic()}"
        try:
            self._client = coordination().LighthouseClient(place.address, connect_timeout=timedelta(seconds=_ANSWER_S))
        except _ERRORS as error:
            raise self._silent(error) from error
        self._ended = Event()
        self._beating: Thread | None = None

    def ask(self, *, update: int, tries: int, patient: bool, store: str, timeout_s: float) -> list[Peer]:
        """All processes that ask at the same time, by number; see `Peer`."""
        if self._beating is None:
            self._beating = Thread(target=self._beat, name="evenstep-heartbeat", daemon=True)
            self._beating.start()
        try:
            answer = self._client.quorum(
                replica_id=self.name,
                timeout=timedelta(seconds=timeout_s),
                address=gethostname(),
                store_address=store,
                step=update,
                world_size=1,
                shrink_only=False,
                data={"number": self.place.rank, "tries": tries, "patient": patient},
            )
        except _ERRORS as error:
            raise self._silent(error) from error
        members = [Peer(name=one.replica_id, store=one.store_address, **one.data) for one in answer.participants]
        return sorted(members, key=lambda one: (one.number, one.name))

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            try:
                self._client.heartbeat(self.name)
            except _ERRORS:  # the next question raises if nobody answers
                self._ended.wait(1.0)

    def _silent(self, error: Exception) -> LostRankError:
        return LostRankError(
            f"the lighthouse at {self.place.address} gives no answer: {str(error).splitlines()[0]} "
            f"It runs in the launcher, or where `torchft_lighthouse` was started."
        )


@final
class _Alone(Group):
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
        self._now: _Alone | Processes = _Alone(mine.rank, mine.ranks)
        self.rank, self.ranks, self.count = mine.rank, mine.ranks, mine.ranks
        self.members: dict[str, int] = {}
        self._formed: list[Peer] = []
        self._asked: list[Peer] = []  # the members of the next group, if they are known
        self._tries = self._update = 0
        self._has_begun, self._built_at = False, monotonic()
        # the first process lets the others find each other; it takes part in every group
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if mine.rank == 0 else None
        host = "localhost" if "localhost" in mine.address else gethostname()
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
            now = Processes("cpu", info=info, timeout_s=self._timeout_s, meeting_s=_MEETING_S, answer_s=_SILENT_S)
        except (EvenstepError, RuntimeError) as error:
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
            self._now = _Alone(self.rank, self.ranks)

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
    "begin_receive begin_send begin_work broadcast explained fail gather interrupt interrupted meet sum "
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
