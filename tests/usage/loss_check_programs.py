"""Runs of the loss check on several ranks."""

from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.parallel import Mesh, Single
from evenstep.pipeline import PipelineModel

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 3)) for n in range(24)]


class Classify(evenstep.Task):
    def __init__(self, reduction: str) -> None:
        self.how = reduction

    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output, batch[1], reduction=self.how)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2)), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))]


def train(name: str, reduction: str, check_loss: bool, size: int = 12) -> tuple[str, float]:
    """The digest of the parameters after two updates, and the last loss."""
    group = group_of_ranks()
    if name == "stages":
        mesh = Mesh.of(group, pipeline=2)
        model: Any = PipelineModel(layers(), mesh=mesh)
        strategy: Any = Single(mesh.data)
    else:
        model, strategy = nn.Sequential(*layers()), strategy_named(name, group)
    trainer = evenstep.Trainer(
        model=model,
        task=Classify(reduction),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=evenstep.MapData(SAMPLES, global_batch_size=size, micro_batch_size=4),
        updates=2,
        device="cpu",
        strategy=strategy,
        train=evenstep.Training(check_loss=check_loss),
    )
    result = trainer.train()
    return digest(trainer.state_dict()["model"]), result.metrics["train/loss"]
