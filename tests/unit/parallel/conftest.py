"""Ranks as threads of one process: fast, and their messages can be counted."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.parallel import Group

TIMEOUT_S = 20


class Meeting:
    """Where the threads of one group meet: everybody's value, by rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.values: list[Any] = [None] * ranks
        self.mail: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(ranks) for b in range(ranks)}


class Threads(Group):
    """One thread's view of the group."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._meeting = rank, ranks, meeting
        self.said: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        self.said.append("gather")
        return self._meet(value)

    def _meet(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait(TIMEOUT_S)
        values = list(self._meeting.values)
        self._meeting.barrier.wait(TIMEOUT_S)
        return values

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        self.said.append(f"sum {len(values)} floats")
        return [sum(column) for column in zip(*self._meet(list(values)), strict=True)]

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        self.said.append(f"sum {tensor.numel()}")
        total = reduce(torch.add, self._meet(tensor.clone()))  # one after another, in the tensor's own format

        def wait() -> None:
            tensor.copy_(total)

        return wait

    def send(self, tensor: Tensor, rank: int) -> None:
        self._meeting.mail[self.rank, rank].put(tensor.clone())

    def receive(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self._meeting.mail[rank, self.rank].get(timeout=TIMEOUT_S))

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._meet(tensor.detach().clone())[rank])


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Threads], Any]], list[Any]]:
    """Run a function once per rank, each with its group; gives the results by rank."""

    def run(ranks: int, act: Callable[[Threads], Any]) -> list[Any]:
        meeting = Meeting(ranks)
        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(act, Threads(meeting, rank, ranks)) for rank in range(ranks)]
            return [future.result(timeout=2 * TIMEOUT_S) for future in futures]

    return run
