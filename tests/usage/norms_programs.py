"""Runs whose numbers about gradients and parameters are looked at: a model with single numbers among its parameters."""

import os
from typing import Any

import torch
from launched import group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep.contrib.multitask import AlignedMtl
from evenstep.data import AllTasks, Mixture
from evenstep.events import Statistics
from evenstep.parallel import Mesh
from evenstep.pipeline import PipelineModel

UPDATES = 3


class Scaled(nn.Module):
    """Times a learned number, such as a temperature: what shards can't be cut from."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def model_with_numbers() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), Scaled(), nn.Tanh(), nn.Linear(4, 4), Scaled(), nn.Linear(4, 1))
    return made.double()


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Cubic(Square):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) + batch[1]).abs() ** 3).sum()


def points(count: int = 16, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(3, generator=draw, dtype=torch.float64), torch.randn((), generator=draw, dtype=torch.float64))
        for _ in range(count)
    ]


def _data(seed: int = 1) -> evenstep.MapData:
    return evenstep.MapData(points(seed=seed), global_batch_size=8, micro_batch_size=2, shuffle=False)


def metrics_of(strategy: str, pipeline: int = 1, several: bool = False, **more: Any) -> dict[str, list[float]]:
    """What a run's metrics were at each update, by name.

    Args:
        strategy: by name.
        pipeline: ranks of one pipeline; 1 trains the model whole.
        several: whether it has two tasks, whose gradients are combined.
        more: arguments of the trainer.
    """
    group = group_of_ranks()
    model: nn.Module = model_with_numbers()
    data_group = group
    if pipeline > 1:
        mesh = Mesh.of(group, pipeline=pipeline)
        model, data_group = PipelineModel(model, mesh=mesh, schedule="1f1b"), mesh.data if mesh.data.ranks > 1 else None
    named = dict(model.named_parameters())
    matrices = [one for one in named.values() if one.ndim > 1]
    others = [one for one in named.values() if one.ndim <= 1]
    task: Any = {"square": Square(), "cubic": Cubic()} if several else Square()
    data: Any = Mixture({"square": _data(), "cubic": _data(2)}, mixing=AllTasks()) if several else _data()
    trainer = evenstep.Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 0.01}], lr=0.05),
        data=data,
        updates=UPDATES,
        device="cpu",
        strategy=strategy_named(strategy, data_group),
        train=evenstep.Training(combine=AlignedMtl() if several else None, clip_norm=0.1),
        hooks=[Statistics(every_updates=1, update_ratio=True, gradient_norms=True)],
        log=evenstep.Logging(every_updates=1, writers=()),
        **more,
    )
    trainer.train()
    found = history_of(trainer)
    state = trainer.state_dict()["model"]
    if int(os.environ.get("RANK", "0")) == 0:
        found["parameters"] = [float(value) for one in state.values() for value in one.flatten()]
    return found


def history_of(trainer: evenstep.Trainer) -> dict[str, list[float]]:
    """The values of each metric of training."""
    storage = trainer.storage
    return {name: [one.value for one in storage.history(name)] for name in storage.names() if name.startswith("train/")}
