"""Runs of users whose model is whole, in stages, in replicas, or goes from one layout to another."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep import Memory
from evenstep.parallel import Ddp, Group, Mesh
from evenstep.pipeline import Layer, PipelineModel


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


class Sampled(Square):
    """A loss that draws as well, such as one of sampled negatives."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2 * torch.rand(len(output))).sum()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.dropout(self.linear(x)).tanh(), 0.2, self.training)


class Net(nn.Module):
    """Says its layers, some of which stand in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.ModuleList(Block(8) for _ in range(3)), nn.Linear(8, 2)

    def layers(self) -> list[Layer]:
        blocks = [Layer(f"blocks.{n}", block) for n, block in enumerate(self.blocks)]
        return [Layer("first", self.first), *blocks, Layer("last", self.last)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(Block(8) for _ in range(2)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


class Nested(nn.Module):
    """Has its blocks in one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder, self.last = nn.Linear(4, 8), Encoder(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)))


class Numbers(nn.Module):
    """Adds noise of numpy's and Python's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand()) + random.random()


def sequence() -> nn.Module:
    act = nn.Tanh()  # one module in three places
    return nn.Sequential(
        nn.Linear(4, 8),
        act,
        nn.Dropout(0.3),
        nn.Sequential(nn.Linear(8, 8), act, nn.Dropout(0.2)),
        nn.Linear(8, 8),
        act,
        nn.Linear(8, 2),
    )


def checkpointed() -> nn.Module:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    return nn.Sequential(nn.Linear(4, 8), Again(), Again(), nn.Linear(8, 2))


def shared_dropout() -> nn.Module:
    drop = nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(4, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 2), Numbers())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.1), nn.Linear(8, 2))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


def without_parameters() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 8), nn.Linear(8, 2))


def frozen_end() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


class Replaced(nn.Module):
    """Puts a new tensor in the place of its buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def replacing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Replaced(), nn.Linear(8, 2))


MODELS = {
    one.__name__: one
    for one in (
        Net,
        Nested,
        sequence,
        checkpointed,
        shared_dropout,
        normed,
        spectral,
        frozen,
        without_parameters,
        frozen_end,
        replacing,
    )
}


def points(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn((), generator=generator)) for _ in range(count)]


class Watched(evenstep.Hook):
    """Stops after so many updates."""

    def __init__(self, until: int) -> None:
        self.until = until

    def after_update(self, event: Any) -> None:
        if event.update == self.until:
            self.trainer.request_stop("half")


def train(
    model: str,
    strategy: str = "ordered",
    *,
    pipeline: int = 1,
    schedule: str = "1f1b",
    folder: str = "",
    until: int = 0,
    groups: bool = False,
    ema: bool = False,
    ema_from: int = 0,
    task: str = "Square",
    batch: int = 8,
    checkpoint: str = "none",
    group: Any = None,
) -> dict[str, Any]:
    """Train a model by name on the ranks that there are; gives digests.

    Args:
        model: of `MODELS`.
        strategy: of the data-parallel ranks.
        pipeline: ranks of one pipeline; 1 trains the model whole.
        schedule: of the pipeline.
        folder: to save in and to go on from; "" keeps nothing.
        until: the update to stop after; 0 trains to the end.
        groups: whether the optimizer has two groups, of matrices and of others.
        ema: whether an average follows.
        ema_from: the update after which it does; then at every second one.
        task: of this module.
        batch: the global batch size.
        checkpoint: of which modules activations are computed again.
        group: of the ranks, where there are several.
    """
    torch.manual_seed(0)
    made: nn.Module = MODELS[model]()
    data = group
    if pipeline > 1:
        mesh = Mesh.of(group or Group(), pipeline=pipeline)
        made = PipelineModel(made, mesh=mesh, schedule=schedule)
        data = mesh.data if mesh.data.ranks > 1 else None
    parameters = list(made.parameters())
    halves = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]]
    listed: list[Any] = [{"params": some} for some in (halves if groups else [parameters])]
    trainer = evenstep.Trainer(
        model=made,
        task={"Square": Square, "Sampled": Sampled}[task](),
        optimizer=torch.optim.AdamW(listed, lr=0.01, foreach=True),
        updates=6,
        device="cpu",
        strategy=strategy_named(strategy, data) if data is not None or "ordered" not in strategy else Ddp(),
        data=evenstep.MapData(points(), global_batch_size=batch, micro_batch_size=2),
        train=evenstep.Training(
            clip_norm=0.5,
            ema=evenstep.Ema(
                decay=0.7,
                decay_warmup=True,
                evaluated="both",
                start_update=ema_from,
                every_updates=2 if ema_from else 1,
            )
            if ema
            else None,
            memory=Memory(checkpoint=checkpoint),
        ),
        evaluations={"valid": evenstep.MapData(points(6), global_batch_size=4, micro_batch_size=2, shuffle=False)},
        hooks=[Watched(until)],
        folder=Path(folder) if folder else None,
    )
    if folder:
        trainer.resume("auto")
    result = trainer.train()
    local = {name: buffer.clone() for name, buffer in made.named_buffers()}
    state = trainer.state_dict()
    buffers = {name for name in state["model"] if name in MODELS[model]().state_dict() and name in _buffers(model)}
    return {
        "parameters": digest({name: value for name, value in state["model"].items() if name not in buffers}),
        "optimizer": digest(state["optimizer"]["state"]),
        "local": digest(local),
        "ema": digest(state["ema"]),
        "valid": [result.metrics.get(name) for name in ("valid/loss", "valid/parameters/loss")],
    }


def _buffers(model: str) -> set[str]:
    return {name for name, _ in MODELS[model]().named_buffers()}


def run_each(ways: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """`train` with each model and its arguments, one after the other, on the same ranks."""
    group = group_of_ranks()
    return [train(model, group=group, **arguments) for model, arguments in ways]
