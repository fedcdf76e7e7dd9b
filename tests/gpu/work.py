"""What the tests on a device train: a small network, its data, and ways to say what became of it."""

import hashlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Loss, MapData, Task, Trainer, Training
from evenstep.optim.schedules import Linear
from evenstep.precision import PRECISIONS, Float8Mixed, Precision
from evenstep.precision.float8 import CAPABILITY

WIDTH, SAMPLES = 16, 48
SIDE = 256  # of the batches that need much memory


class Squares(Task):
    """Σ (output - y)², with a metric."""

    def loss(self, output: Any, batch: Any) -> Loss:
        error = output.float().squeeze(-1) - batch[1]
        return Loss(error.square().sum(), metrics={"error": (error.detach().abs().sum(), len(batch[1]))})


class Waves(nn.Module):
    """Needs about 768 MiB for the graph of 256 samples of width 256, and 1 KiB for its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.linspace(0.1, 1.0, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x.unsqueeze(-1) * self.frequencies).mean((1, 2))


class Small(Waves):
    """The same where there is no device whose memory can run out: it says that it has room for half the samples.

    Args:
        room: for so many samples.
    """

    def __init__(self, room: int = SIDE // 2) -> None:
        super().__init__()
        self._room = room

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self._room and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB (stand-in).")
        return super().forward(x[:, :4])


class Mean(Task):
    """The squared distance of the output, summed."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output - batch[1]).square().sum()

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def wide_batch(seed: int = 2) -> tuple[Tensor, Tensor]:
    """Samples for `Waves`, of which memory has no room for all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIDE, SIDE, generator=generator), torch.randn(SIDE, generator=generator)


def network(*, norm: bool = False, dropout: float = 0.1) -> nn.Sequential:
    """The same numbers each time, on the CPU."""
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )


class Block(nn.Module):
    """Of several operations of torch, which are compiled together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


def in_blocks() -> nn.Sequential:
    """The same numbers each time, on the CPU."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))


def samples(count: int = SAMPLES, *, bad: Iterable[int] = ()) -> list[tuple[Tensor, Tensor]]:
    """y is the mean of x; those that are `bad` are NaN."""
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(WIDTH, generator=generator) for _ in range(count)]
    return [(x * float("nan") if number in set(bad) else x, x.mean()) for number, x in enumerate(inputs)]


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def trainer_of(device: torch.device, model: nn.Module | None = None, **given: Any) -> Trainer:
    """A trainer of the network with the work's data; everything may be given."""
    model = network() if model is None else model
    data = given.pop("samples", None) or samples()
    arguments: dict[str, Any] = {
        "model": model,
        "task": Squares(),
        "optimizer": adamw(model),
        "data": MapData(data, global_batch_size=8, micro_batch_size=given.pop("micro", 4), shuffle=True),
        "updates": 8,
        "device": device,
        "train": Training(clip_norm=1.0),
    }
    return Trainer(**{**arguments, **given})


def ended_at(device: torch.device, folder: Path, *, goes_on: bool = False, **given: Any) -> str:
    """The sha256 that a trainer's run in this folder ends with, gone on with from its newest checkpoint or not."""
    trainer = trainer_of(device, folder=folder, **given)
    if goes_on:
        trainer.resume("auto")
    trainer.train()
    return sha256(trainer.model.state_dict())


def engine_of(device: torch.device, model: nn.Module | None = None, **given: Any) -> Engine:
    """An engine of the network, with everything armed that may stand in an update."""
    model = network(norm=True) if model is None else model
    arguments: dict[str, Any] = {
        "task": Squares(),
        "optimizer": adamw(model),
        "lr_schedule": Linear(warmup_updates=2),
        "updates": 100,
        "device": device,
        "train": Training(clip_norm=1.0, check_loss=False, settle_every_updates=100),
    }
    return Engine(model, **{**arguments, **given})


def batches(count: int, size: int = 4, *, device: torch.device | None = None) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches on the host, in pinned memory where they go to a CUDA device."""
    some = samples(count * size)
    parts = [some[begin : begin + size] for begin in range(0, len(some), size)]
    made = [(torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])) for part in parts]
    pins = device is not None and device.type == "cuda"
    return [(x.pin_memory(), y.pin_memory()) for x, y in made] if pins else made


def precision_of(name: str, device: torch.device) -> Precision:
    """A number format in which the network trains on the device; skipped where that can't be."""
    if name != "float8-mixed":
        return PRECISIONS[name]()
    if find_spec("torchao") is None:
        pytest.skip("the extra `float8` is not installed")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        pytest.skip(f"{torch.cuda.get_device_name(device)} does not multiply float8")
    return Float8Mixed(layers="*", emulate=device.type == "cpu")


@contextmanager
def no_waiting(device: torch.device) -> Generator[None]:
    """Inside, torch raises where the host waits for a CUDA device; a CPU is never waited for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def sha256(state: Any) -> str:
    """Of all bits of a state's tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flat(model: nn.Module) -> Tensor:
    """All parameters, on the host, in float64."""
    return torch.cat([parameter.detach().double().cpu().flatten() for parameter in model.parameters()])
