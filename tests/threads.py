"""Ranks as threads of one process, whose group ends when one of them fails, as that of processes does."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import product
from queue import Empty, Queue
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import LostRankError
from evenstep.parallel import Group
from evenstep.parallel.group import Interrupted

TIMEOUT_S = 20.0


class Meeting:
    """Where the threads of one group meet: values by rank, who has failed, and who has interrupted."""

    def __init__(self, ranks: int, changed: threading.Condition | None = None) -> None:
        self.ranks, self.changed = ranks, changed or threading.Condition()
        self.parts: list[Meeting] = []  # of groups that were split off
        self.failed = ""
        self.works = [0] * ranks  # by rank, the work that it has begun
        self.renew()

    def renew(self) -> None:
        self.calls = [0] * self.ranks  # by rank, how many values it has given
        self.values: dict[int, dict[int, Any]] = {}  # by call and rank
        ways = product(range(self.ranks), range(self.ranks), range(2))  # from, to, channel
        self.mail: dict[tuple[int, int, int], Queue[Tensor]] = {way: Queue() for way in ways}
        self.broken = 0, ""  # the work that a rank has interrupted, and why
        self.told: dict[int, Any] = {}  # by those that have come to meet again
        for part in self.parts:
            part.renew()


class Threads(Group):
    """One thread's view of the group."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int, world: "Threads | None" = None) -> None:
        self.rank, self.ranks, self._meeting = rank, ranks, meeting
        self._world = world or self
        self.said: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        self.said.append("gather")
        return self._exchange(value)

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        self.said.append(f"sum {len(values)} floats")
        return [sum(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        self.said.append(f"sum {tensor.numel()}")
        total = reduce(torch.add, self._exchange(tensor.clone()))  # in the tensor's own format

        def wait() -> None:
            tensor.copy_(total)

        return wait

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._exchange(tensor.detach().clone())[rank])

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        self._meeting.mail[self.rank, rank, channel].put(tensor.clone())
        return lambda: None

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        def wait() -> None:
            until = monotonic() + TIMEOUT_S
            while monotonic() < until and not self._meeting.failed and not self.interrupted():
                try:
                    came = self._meeting.mail[rank, self.rank, channel].get(timeout=0.05)
                except Empty:
                    continue
                tensor.view(-1)[: came.numel()] = came.view(-1)
                return
            raise self._lost(f"rank {rank} did not send within {TIMEOUT_S:g} s")

        return wait

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        made = [Meeting(len(part), self._meeting.changed) for part in parts] if self.rank == 0 else []
        for part, meeting in zip(parts, self._exchange(made)[0], strict=True):
            if self.rank in part:
                mine = Threads(meeting, list(part).index(self.rank), len(part), self._world)
                mine.part_of = self.ranks if len(part) < self.ranks else 0
        self._world._meeting.parts.append(mine._meeting)
        return mine

    def begin_work(self) -> int:
        self._meeting.works[self.rank] += 1
        return self._meeting.works[self.rank]

    def interrupt(self, reason: str) -> None:
        meeting = self._meeting
        with meeting.changed:
            work, (earliest, stands) = meeting.works[self.rank], meeting.broken
            if not stands or work < earliest:
                meeting.broken = work, reason
            meeting.changed.notify_all()

    def interrupted(self) -> str:
        world = self._world
        work, reason = world._meeting.broken
        return reason if work <= world._meeting.works[world.rank] else ""

    def meet(self, value: Any) -> list[Any]:
        meeting = self._meeting
        with meeting.changed:
            told = meeting.told
            told[self.rank] = value
            meeting.changed.notify_all()
            meeting.changed.wait_for(lambda: len(told) == self.ranks or meeting.failed, TIMEOUT_S)
            if len(told) < self.ranks:
                raise LostRankError(meeting.failed or f"a rank did not come within {TIMEOUT_S:g} s")
            if meeting.told is told:
                meeting.renew()
        return [told[rank] for rank in range(self.ranks)]

    def fail(self, message: str) -> None:
        world = self._world._meeting
        with world.changed:
            for meeting in (world, *world.parts):
                meeting.failed = meeting.failed or f"rank {self.rank} failed: {message.splitlines()[0]}"
            world.changed.notify_all()

    def _exchange(self, value: Any) -> list[Any]:
        meeting = self._meeting
        with meeting.changed:
            call = meeting.calls[self.rank]
            meeting.calls[self.rank] += 1
            meeting.values.pop(call - 1, None)  # all have come to this call, and hold what they read
            values = meeting.values.setdefault(call, {})
            values[self.rank] = value
            meeting.changed.notify_all()
            meeting.changed.wait_for(
                lambda: len(values) == self.ranks or meeting.failed or self.interrupted(), TIMEOUT_S
            )
        if len(values) < self.ranks:
            raise self._lost(f"a rank did not come within {TIMEOUT_S:g} s")
        return [values[rank] for rank in range(self.ranks)]

    def _lost(self, otherwise: str) -> LostRankError:
        if self._meeting.failed:
            return LostRankError(self._meeting.failed)
        return Interrupted(self.interrupted()) if self.interrupted() else LostRankError(otherwise)


def ends_of_ranks(ranks: int, act: Callable[[Threads], Any]) -> list[Any]:
    """Run `act` once per rank, each with its group; gives results, or exceptions, by rank."""
    meeting = Meeting(ranks)

    def caught(group: Threads) -> Any:
        try:
            return act(group)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    # Threads share torch's generator, whose lock is held while a state is copied. A collection in that moment lets
    # another thread run, which then waits for the lock without letting go of Python: both wait for ever.
    gc.disable()
    try:
        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(caught, Threads(meeting, rank, ranks)) for rank in range(ranks)]
            return [future.result(timeout=4 * TIMEOUT_S) for future in futures]
    finally:
        gc.enable()


def on_ranks(ranks: int, act: Callable[[Threads], Any]) -> list[Any]:
    """Results of `act` by rank; raises the first rank's exception, if any rank raised."""
    ends = ends_of_ranks(ranks, act)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends
