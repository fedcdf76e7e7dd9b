"""Ranks as threads of one process, whose group ends when one of them fails, as that of processes does."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Where the threads of one group meet: everybody's value, by rank; and who has failed."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.values: list[Any] = [None] * ranks
        ways = product(range(ranks), range(ranks), range(2))  # from, to, channel
        self.mail: dict[tuple[int, int, int], Queue[Tensor]] = {context: Queue() for context in ways}
        self.failed: str = ""
        self.broken: str = ""  # why a rank has broken off what all do
        self.parts: list[Meeting] = []  # of groups that were split off
        self.there = threading.Barrier(ranks, action=self.renew)  # where all meet again
        self.told: list[Any] = [None] * ranks

    def renew(self) -> None:
        """Be as new, and so what was split off."""
        for meeting in (self, *self.parts):
            meeting.broken = ""
            meeting.barrier.reset()
            for mail in meeting.mail.values():
                with mail.mutex:
                    mail.queue.clear()

    def interrupt(self, reason: str) -> None:
        """Wake all who wait."""
        for meeting in (self, *self.parts):
            meeting.broken = meeting.broken or reason
            meeting.barrier.abort()


class Threads(Group):
    """One thread's view of the group."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int, world: Meeting | None = None) -> None:
        self.rank, self.ranks, self._meeting = rank, ranks, meeting
        self._world = world or meeting

    def fail(self, message: str) -> None:
        for meeting in (self._world, *self._world.parts):
            if not meeting.failed:
                meeting.failed = f"rank {self.rank} failed: {message}"
            meeting.barrier.abort()
        self._world.there.abort()

    def interrupt(self, reason: str) -> None:
        self._world.interrupt(reason)

    def interrupted(self) -> str:
        return self._world.broken

    def meet(self, value: Any) -> list[Any]:
        self._world.told[self.rank] = value
        try:
            self._world.there.wait(TIMEOUT_S)
            told = list(self._world.told)
            self._world.there.wait(TIMEOUT_S)  # until all have read it
        except threading.BrokenBarrierError as error:
            raise LostRankError(self._world.failed or f"a rank did not come within {TIMEOUT_S:g} s") from error
        return told

    def gather(self, value: Any) -> list[Any]:
        return self._meet(value)

    def _meet(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        try:
            self._meeting.barrier.wait(TIMEOUT_S)
            values = list(self._meeting.values)
            self._meeting.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise self._lost(f"a rank did not come within {TIMEOUT_S:g} s") from error
        return values

    def _lost(self, otherwise: str) -> LostRankError:
        if self._meeting.broken and not self._meeting.failed:
            return Interrupted(self._meeting.broken)
        return LostRankError(self._meeting.failed or otherwise)

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._meet(list(values)), strict=True)]

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        total = torch.stack(self._meet(tensor.clone())).sum(0)

        def wait() -> None:
            tensor.copy_(total)

        return wait

    def send(self, tensor: Tensor, rank: int) -> None:
        self.begin_send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.begin_receive(tensor, rank)()

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        self._meeting.mail[self.rank, rank, channel].put(tensor.clone())
        return lambda: None

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        def wait() -> None:
            until = monotonic() + TIMEOUT_S
            while monotonic() < until and not self._meeting.failed and not self._meeting.broken:
                try:
                    came = self._meeting.mail[rank, self.rank, channel].get(timeout=0.1)
                except Empty:
                    continue
                tensor.view(-1)[: came.numel()] = came.view(-1)
                return
            raise self._lost(f"rank {rank} did not send within {TIMEOUT_S:g} s")

        return wait

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        made = [Meeting(len(part)) for part in parts] if self.rank == 0 else []
        for part, meeting in zip(parts, self._meet(made)[0], strict=True):
            if self.rank in part:
                mine = Threads(meeting, list(part).index(self.rank), len(part), self._world)
        self._world.parts.append(mine._meeting)
        return mine

    def abort(self, reason: str) -> None:
        self.fail(reason)

    def abort_reason(self) -> str:
        return self._meeting.failed

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._meet(tensor.detach().clone())[rank])


def on_ranks(ranks: int, act: Callable[[Group], Any]) -> list[Any]:
    """Run `act` once per rank, each with its group; gives results, or exceptions, by rank."""
    if ranks == 1:
        return [_caught(lambda: act(Group()))]
    meeting = Meeting(ranks)
    gc.disable()  # as in tests/unit/conftest.py: a collection under the lock of torch's generator stops all threads
    try:
        with ThreadPoolExecutor(ranks) as pool:
            groups = [Threads(meeting, rank, ranks) for rank in range(ranks)]
            futures = [pool.submit(_caught, lambda group=group: act(group)) for group in groups]
            return [future.result(timeout=4 * TIMEOUT_S) for future in futures]
    finally:
        gc.enable()


def _caught(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - what it was is looked at by the test
        return error
