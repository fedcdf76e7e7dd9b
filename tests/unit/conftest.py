"""What several packages' tests share: a model with a trunk and heads, tasks for them, and samples."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Loss, Task


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

    def __init__(self, head: str, reduction: Any = "weight", late: bool = False) -> None:
        self.head = head
        self.reduction = reduction
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
