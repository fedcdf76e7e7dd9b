"""Small models, tasks, data and trainers for all tests.

Parameters come from generators of their own, so that ranks that are threads have the same.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Engine, Hook, Logging, Loss, MapData, Task, Trainer
from evenstep.events import Incident
from evenstep.pipeline import Layers

WIDTH = 3  # features of a sample
QUIET = Logging(writers=())


def filled(module: nn.Module, seed: int = 0) -> Any:
    """The module, with parameters that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def line(dtype: torch.dtype = torch.float64) -> Any:
    return filled(nn.Linear(WIDTH, 1, dtype=dtype))


def net(*middle: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Two layers, and whatever is to be between them, of width 5."""
    return filled(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), *middle, nn.Linear(5, 1))).to(dtype)


def noisy(dtype: torch.dtype = torch.float64) -> Any:
    """A model with running statistics and dropout."""
    return net(nn.BatchNorm1d(5), nn.Dropout(0.3), dtype=dtype)


def deep(layers: int = 12) -> Layers:
    """A model for stages, of `layers` layers and one more, each built where it is needed."""

    def built(place: int) -> nn.Module:
        if place % 2:
            return nn.Tanh()
        return filled(nn.Linear(WIDTH, 1 if place == layers else WIDTH), place)

    return Layers.of([lambda place=place: built(place) for place in range(layers + 1)])


class Heads(nn.Module):
    """A trunk and one head per task; only the head asked for is run."""

    def __init__(self, *names: str, width: int = 5, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk or nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(width, 1) for name in names})

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.heads[head](self.trunk(x)).squeeze(-1)


def heads(*names: str, **more: Any) -> Heads:
    return filled(Heads(*names, **more).double(), 1)


class Squares(Task):
    """Σ (output - y)² over samples x, y."""

    def loss(self, output: Any, batch: Any) -> Any:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Weighted(Task):
    """Σ v·(output - y)² over samples x, y, v; weighs Σ v, ahead or with its loss."""

    def __init__(self, late: bool = False) -> None:
        self.late_weight = late

    def weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, output: Any, batch: Any) -> Loss:
        total = (batch[2] * (output.squeeze(-1) - batch[1]) ** 2).sum()
        return Loss(total, weight=batch[2].sum() if self.late_weight else None)


class Regress(Weighted):
    """The same, with a head of its own."""

    def __init__(self, head: str, late: bool = False) -> None:
        super().__init__(late)
        self.head = head

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "head": self.head}


def points(count: int = 24, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Samples x, y."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(WIDTH, generator=generator, dtype=torch.float64).to(dtype), torch.tensor(n % 5 / 4, dtype=dtype))
        for n in range(count)
    ]


def samples(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Samples x, y and their weights 1, 2 and 0 in turn, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(WIDTH, generator=generator, dtype=torch.float64),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.tensor((1.0, 2.0, 0.0)[number % 3], dtype=torch.float64),
        )
        for number in range(count)
    ]


def stacked(some: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*some, strict=True)]


def cut(batch: Sequence[Tensor], size: int) -> list[tuple[Tensor, ...]]:
    """Micro-batches of `size` samples."""
    return list(zip(*(part.split(size) for part in batch), strict=True))


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)


def data(count: int = 24, *, size: int = 8, micro: int | None = 3, seed: int = 0, **more: Any) -> MapData:
    dtype = more.pop("dtype", torch.float64)
    return MapData(points(count, seed=seed, dtype=dtype), global_batch_size=size, micro_batch_size=micro, **more)


def trainer_of(model: nn.Module | None = None, *hooks: Hook | None, **more: Any) -> Trainer:
    """A trainer of 6 updates of `net` with momentum, in an order that is drawn."""
    model = model or net()
    if "epochs" not in more:
        more.setdefault("updates", 6)
    if "data" not in more:
        more["data"] = data(dtype=dtype_of(model))
    more.setdefault("optimizer", torch.optim.SGD([{"params": list(model.parameters())}], lr=0.05, momentum=0.9))
    more.setdefault("task", Squares())
    return Trainer(model=model, device="cpu", hooks=hooks, **({"log": QUIET} | more))


def engine_of(model: nn.Module | None = None, task: Any = None, **more: Any) -> Engine:
    model = model or net()
    optimizer = more.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Engine(model, task or Squares(), optimizer, **({"device": "cpu"} | more))


def train(engine: Engine, updates: Iterable[int], *, size: int = 4, count: int = 8) -> Engine:
    """Make these updates, each of points of its own."""
    dtype = dtype_of(engine.model)
    dtype = dtype if dtype == torch.float64 else torch.float32
    for update in updates:
        engine.update(microbatches=cut(stacked(points(count, seed=update, dtype=dtype)), size))
    return engine


class StopAt(Hook):
    """Requests a stop after an update."""

    def __init__(self, update: int | None) -> None:
        self.update = update

    def after_update(self, event: Any) -> None:
        if event.update == self.update:
            self.trainer.request_stop("test")


class FailAt(Hook):
    """Raises before an update."""

    def __init__(self, update: int, error: BaseException | None = None) -> None:
        self.update, self.error = update, error or ValueError("injected")

    def before_update(self, event: Any) -> None:
        if event.update == self.update:
            raise self.error


class Heard(Hook):
    """Keeps the incidents."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    @property
    def kinds(self) -> list[str]:
        return [one.kind for one in self.incidents]

    def on_incident(self, event: Incident) -> None:
        self.incidents.append(event)


def history(trainer: Trainer, name: str) -> list[float]:
    return [record.value for record in trainer.storage.history(name)]


def saved_updates(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
