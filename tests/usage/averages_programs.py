"""A run whose checkpoints are averaged, on ranks that hold parts of it."""

from pathlib import Path
from typing import Any

import torch
from launched import group_of_ranks
from torch import Tensor, nn

import evenstep
from evenstep.parallel import Mesh, strategy_named


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, generator=generator), torch.randn(1, generator=generator)) for _ in range(16)]


def train(folder: str, strategy: str, pipeline: int, init_from: str = "") -> float:
    """Train on the ranks that there are, saving at each second update; gives what it evaluates at the end."""
    group = group_of_ranks()
    mesh = Mesh.of(group, pipeline=pipeline)
    made = network(seed=1 if not init_from else 2)
    if init_from:
        evenstep.load_weights(made, init_from)
    model = evenstep.PipelineModel(made, mesh=mesh) if pipeline > 1 else made
    trainer = evenstep.Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        data=evenstep.MapData(points(), global_batch_size=8, micro_batch_size=2),
        evaluations=evenstep.MapData(points(), global_batch_size=16, micro_batch_size=2, shuffle=False),
        updates=4,
        device="cpu",
        strategy=strategy_named(strategy, mesh.data),
        folder=Path(folder),
        checkpoint=evenstep.Checkpointing(every_updates=2, asynchronous=False),
    )
    if init_from:
        return trainer.evaluate("valid")["valid"]["loss"]
    trainer.train()
    return trainer.evaluate("valid")["valid"]["loss"]
