"""Injects faults into a run at (rank, update, phase), as the task, the dataset and the hook of that run."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.data import ReadOptions
from evenstep.events import MicrobatchEvent, UpdateEvent


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong, where, and how often.

    Args:
        act: what happens; it mostly raises.
        phase: "transfer", "forward", "backward", "armed" (the backward whose gradients are reduced), "step",
            "evaluate", "before_update", "after_update".
        update: in which; None for any.
        rank: on which; None for all.
        times: how often; None for always.
        larger_than: only for batches of more samples than this.
        let_pass: how often it could have struck before it does.
    """

    act: Callable[[], object]
    phase: str
    update: int | None = None
    rank: int | None = 0
    times: int | None = 1
    larger_than: int = 0
    let_pass: int = 0
    struck: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def strike(self, phase: str, rank: int, update: int, samples: int = 1_000_000) -> None:
        """Go wrong, if this is the place."""
        here = phase == self.phase and self.rank in (None, rank) and self.update in (None, update)
        with self.lock:
            if not here or samples <= self.larger_than or (self.times is not None and self.struck >= self.times):
                return
            if self.let_pass:
                self.let_pass -= 1
                return
            self.struck += 1
        self.act()


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("the device has no memory left (injected)")


def cpu_out_of_memory() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:123] . DefaultCPUAllocator: can't allocate memory (injected)")


def memory_error() -> None:
    raise MemoryError("injected")


def raised() -> None:
    raise ValueError("a bug of the user's")


@dataclass(slots=True)
class Place:
    """Where one rank is, and whether the micro-batch in backward is its last."""

    rank: int
    update: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])
    last_microbatch: int = -1
    microbatch: int = -1

    @property
    def last(self) -> bool:
        return self.microbatch == self.last_microbatch

    def strike(self, phase: str, samples: int = 1_000_000) -> None:
        for fault in self.faults:
            fault.strike(phase, self.rank, self.update, samples)


class Strikes(torch.autograd.Function):
    """The identity, whose backward lets a fault strike in the midst of the model's backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Place, samples: int, phase: str) -> Tensor:
        ctx.at = place, samples, phase
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        place, samples, phase = ctx.at
        place.strike(phase, samples)
        if place.last:
            place.strike("armed", samples)
        return grads[0], None, None, None


def struck(module: Any, hidden: Tensor, samples: int) -> Tensor:
    """`hidden`, after the faults of a forward, and with those of its backward."""
    if not module.training:
        module.place.strike("evaluate", samples)
        return hidden
    module.place.strike("forward", samples)
    return Strikes.apply(hidden, module.place, samples, "backward")


def drawn(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    module.double()


class Hidden(nn.Module):
    """One layer in float64, after which faults strike. No dropout: cutting keeps the gradient."""

    def __init__(self, place: Place, number: int, width: int = 6) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(3 if number == 0 else width, width)
        drawn(self, number)

    def forward(self, inputs: Tensor) -> Tensor:
        return struck(self, torch.tanh(self.linear(inputs)), len(inputs))


class Sum(nn.Module):
    """The last layer: without parameters."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sum(-1, keepdim=True)


class Chain(nn.Module):
    """Three units that FSDP2 gathers one by one, and a head that belongs to the whole."""

    def __init__(self, place: Place, *, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Hidden(place, number) for number in range(3)])
        self.norm = nn.BatchNorm1d(6).double() if norm else nn.Identity()
        self.head = nn.Linear(6, 1).double()
        with torch.no_grad():
            self.head.weight.fill_(0.3)
            self.head.bias.fill_(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(self.norm(inputs))


class Square(evenstep.Task):
    """Summed squares over points whose weights differ."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def weight(self, batch: Any) -> float:
        return float(batch[2].sum())

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        error = (output.squeeze(-1) - batch[1]) ** 2
        return evenstep.Loss((error * batch[2]).sum(), metrics={"error": (error.detach().sum(), len(error))})

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


class Where(evenstep.Hook):
    """Keeps a place up to date, and lets faults strike before and after updates."""

    def __init__(self, place: Place, rank: int, ranks: int) -> None:
        self.place, self.rank, self.ranks = place, rank, ranks

    def before_update(self, event: UpdateEvent) -> None:
        self.place.update = event.update
        mine = ReadOptions(seed=0, rank=self.rank, ranks=self.ranks).share(event.num_microbatches)
        self.place.last_microbatch = max(mine, default=-1)
        self.place.strike("before_update")

    def before_backward(self, event: MicrobatchEvent) -> None:
        self.place.microbatch = event.microbatch

    def after_update(self, event: UpdateEvent) -> None:
        self.place.strike("after_update")


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Points with weights; reading one may fail."""

    def __init__(self, count: int = 48, fail: Callable[[int], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        self.fail = fail

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.fail is not None:
            self.fail(index)
        point = self.points[index]
        return point, point.sum().sin(), torch.tensor(1.0 + index % 3, dtype=torch.float64)
