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
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True),
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


def averaged(strategy: str, pipeline: int) -> dict[str, list[Any]]:
    """The average after some updates in float64, on the ranks that there are, as numbers."""
    mesh = Mesh.of(group_of_ranks(), pipeline=pipeline)
    made = network().double()
    model = evenstep.PipelineModel(made, mesh=mesh) if pipeline > 1 else made
    data = [(x.double(), y.double()) for x, y in points()]
    trainer = evenstep.Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data=evenstep.MapData(data, global_batch_size=8, micro_batch_size=4, shuffle=False),
        updates=12,
        device="cpu",
        strategy=strategy_named(strategy, mesh.data),
        train=evenstep.Training(ema=evenstep.Ema(decay=0.8, start_update=1, every_updates=2, decay_warmup=True)),
    )
    trainer.train()
    return {name: one.tolist() for name, one in trainer.state_dict()["ema"].items()}


def averaged_plainly() -> list[Tensor]:
    """The same in a few lines of torch, in one process."""
    model, average = network().double(), network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = (torch.stack([point[part] for point in points()]).double() for part in (0, 1))
    for update in range(1, 13):
        part = slice(0, 8) if update % 2 else slice(8, 16)
        optimizer.zero_grad()
        output = model(x[part])
        loss = ((output - y[part]) ** 2).sum()
        (loss / 8).backward()
        optimizer.step()
        if update == 1:  # `start_update`: a copy, whatever `every_updates` is
            average.load_state_dict(model.state_dict())
        elif update % 2 == 0:
            decay = min(0.8, (1 + update // 2) / (10 + update // 2))
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.copy_(decay * old + (1 - decay) * new)
    return [one.detach() for one in average.parameters()]
