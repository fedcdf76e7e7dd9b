"""What several packages' tests share: ranks as threads of one process, and a model with several tasks."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from itertools import product
from queue import Empty, Queue
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Loss, Task
from evenstep.errors import LostRankError
from evenstep.parallel import Group

TIMEOUT_S = 20


class Meeting:
    """Where the threads of one group meet: everybody's value, by rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.values: list[Any] = [None] * ranks
        self.words: list[str] = []  # of those who have given up
        ways = product(range(ranks), range(ranks), range(2))  # from, to, channel
        self.mail: dict[tuple[int, int, int], Queue[Tensor]] = {context: Queue() for context in ways}


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
        try:
            self._meeting.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise LostRankError(self.failure() or f"a rank did not come within {TIMEOUT_S} s") from error
        values = list(self._meeting.values)
        with suppress(threading.BrokenBarrierError):  # a rank that has read them may have failed since
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

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        self._meeting.mail[self.rank, rank, channel].put(tensor.clone())
        return lambda: None

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        mail = self._meeting.mail[rank, self.rank, channel]

        def wait() -> None:
            until = monotonic() + TIMEOUT_S
            while monotonic() < until and not self._meeting.words:
                try:
                    came = mail.get(timeout=0.05)
                except Empty:
                    continue
                tensor.view(-1)[: came.numel()] = came.view(-1)
                return
            raise LostRankError(self.failure() or f"rank {rank} did not send within {TIMEOUT_S} s")

        return wait

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        made = [Meeting(len(part)) for part in parts] if self.rank == 0 else []
        for part, meeting in zip(parts, self._meet(made)[0], strict=True):
            meeting.words = self._meeting.words
            if self.rank in part:
                mine = Threads(meeting, list(part).index(self.rank), len(part))
                mine.part_of = self.ranks if len(part) < self.ranks else 0
        return mine

    def fail(self, message: str, *, wake: bool = False) -> None:
        self._meeting.words.append(f"rank {self.rank} failed: {message.splitlines()[0]}")
        if wake:
            self._meeting.barrier.abort()

    def failure(self) -> str:
        return self._meeting.words[0] if self._meeting.words else ""

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._meet(tensor.detach().clone())[rank])


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Threads], Any]], list[Any]]:
    """Run a function once per rank, each with its group; gives the results by rank."""

    def run(ranks: int, act: Callable[[Threads], Any]) -> list[Any]:
        meeting = Meeting(ranks)
        # Threads share torch's generator, whose lock is held while a state is copied. A collection in that moment lets
        # another thread run, which then waits for the lock without letting go of Python: both wait for ever.
        gc.disable()
        try:
            with ThreadPoolExecutor(ranks) as pool:
                futures = [pool.submit(act, Threads(meeting, rank, ranks)) for rank in range(ranks)]
                return [future.result(timeout=2 * TIMEOUT_S) for future in futures]
        finally:
            gc.enable()

    return run


class Heads(nn.Module):
    """A trunk and one head per task; only the head asked for is run."""

    def __init__(self, *names: str, width: int = 5, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk or nn.Sequential(nn.Linear(3, width), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(width, 1) for name in names})

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.heads[head](self.trunk(x)).squeeze(-1)


class Regress(Task):
    """Σ v·(output - y)² over samples x, y, v; weighs Σ v."""

    def __init__(self, head: str, late: bool = False) -> None:
        self.head = head
        self.late_weight = late

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "head": self.head}

    def weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, output: Any, batch: Any) -> Loss | None:
        total = (batch[2] * (output - batch[1]) ** 2).sum()
        return Loss(total, weight=batch[2].sum() if self.late_weight else None)


def samples(count: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Samples with weights 1, 2 and 0 in turn, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(3, generator=generator, dtype=torch.float64),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.tensor((1.0, 2.0, 0.0)[number % 3], dtype=torch.float64),
        )
        for number in range(count)
    ]


def stacked(some: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*some, strict=True)]


def model_of(*names: str, **more: Any) -> Heads:
    """The same parameters always, whatever other threads draw meanwhile."""
    model = Heads(*names, **more).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="session")
def several() -> Any:
    """A model with a head for each of several tasks: Heads, Regress, samples, stacked, model_of, flat."""
    return SimpleNamespace(Heads=Heads, Regress=Regress, samples=samples, stacked=stacked, model_of=model_of, flat=flat)
