"""A run whose parameters are in groups, and the same by one optimizer of torch's for each parameter, in float64.

It is what `rows.groups` compares. The reference shares no code with the engine: which parameter is stepped with what is
written out by hand.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

import evenstep
from evenstep import (
    Checkpointing,
    Hook,
    MapData,
    Mesh,
    ParameterGroup,
    PipelineModel,
    Trainer,
    Training,
    grouped_optimizer,
)
from evenstep.errors import EvenstepError
from evenstep.events import UpdateEvent
from evenstep.optim.schedules import Listed, PerGroup
from evenstep.pipeline import Layer

UPDATES, LR, CLIP = 12, 0.05, 0.4
HALVED = 5  # the update from which on one group has half its rate


class Block(nn.Module):
    """x + tanh(linear(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Two blocks, with a matrix before and one behind."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList([Block(), Block()]), nn.Linear(4, 1)
        self.double()

    def layers(self) -> list[Layer]:
        """What a pipeline cuts."""
        blocks = [Layer(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [Layer("embed", self.embed), *blocks, Layer("head", self.head)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Square(evenstep.Task):
    """The squared distance to the label."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


SETTINGS: dict[str, Mapping[str, Any]] = {
    "decay of matrices": {"weight_decay_on": "matrices", "options": {"weight_decay": 0.1}},
    "frozen, factors": {
        "groups": {
            "input": ParameterGroup(patterns=("embed.*",), frozen=True),
            "norms": ParameterGroup(patterns=("*.norm.*",), lr_factor=2.0, weight_decay=0.0),
            "head": ParameterGroup(patterns=("head.*",), options={"betas": (0.5, 0.9)}),
        },
        "options": {"weight_decay": 0.3},
    },
    "Muon and AdamW": {
        "groups": {"matrices": ParameterGroup(patterns=("blocks.*",), dims=2, optimizer=torch.optim.Muon, lr=0.02)},
        "weight_decay_on": "matrices",
    },
    "two schedules": {"groups": {"late": ParameterGroup(patterns=("head.*", "blocks.1.*"))}},
}


def stepped_with(setting: str, name: str, update: int) -> tuple[type, dict[str, Any]] | None:
    """The optimizer of one parameter and its arguments, by hand; None if it is frozen."""
    adamw, matrix = torch.optim.AdamW, name.endswith("weight") and "norm" not in name
    if setting == "decay of matrices":
        return adamw, {"lr": LR, "weight_decay": 0.1 if matrix else 0.0}
    if setting == "frozen, factors":
        if "embed" in name:
            return None
        own = {"lr": 2 * LR, "weight_decay": 0.0} if "norm" in name else {"lr": LR, "weight_decay": 0.3}
        return adamw, own | ({"betas": (0.5, 0.9)} if "head" in name else {})
    if setting == "Muon and AdamW":
        if matrix and "blocks" in name:
            return torch.optim.Muon, {"lr": 0.02}
        return adamw, {"lr": LR} | ({} if matrix else {"weight_decay": 0.0})
    late = "head" in name or "blocks.1" in name
    return adamw, {"lr": LR / 2 if late and update >= HALVED else LR}


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double()) for _ in range(24)
    ]


def by_hand(setting: str) -> dict[str, list[float]]:
    """The parameters after the same updates."""
    model = Net()
    named = dict(model.named_parameters())
    made = {name: stepped_with(setting, name, 1) for name in named}
    optimizers = {name: kind([named[name]], **own) for name, (kind, own) in _given(made).items()}
    x, y = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    for update in range(1, UPDATES + 1):
        part = slice((update - 1) % 3 * 8, (update - 1) % 3 * 8 + 8)
        model.zero_grad()
        (((model(x[part]) - y[part]) ** 2).sum() / 8).backward()
        nn.utils.clip_grad_norm_([named[name] for name in optimizers], CLIP)
        for name, (_, own) in _given({name: stepped_with(setting, name, update) for name in optimizers}).items():
            optimizers[name].param_groups[0]["lr"] = own["lr"]
            optimizers[name].step()
    return {name: one.flatten().tolist() for name, one in named.items()}


def _given(made: Mapping[str, tuple[type, dict[str, Any]] | None]) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {name: one for name, one in made.items() if one is not None}


class KillAt(Hook):
    """Kills the last rank as an update begins, without a chance to tidy up."""

    def __init__(self, update: int, rank: int) -> None:
        self._update, self._rank = update, rank

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self._update and self._rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    settings: list[str], strategy: str, stages: int, size: int, folder: str | None = None, kill: int | None = None
) -> list[tuple[dict[str, list[float]], str]]:
    """For each setting the parameters after the run, and a sha256 of all that training changes."""
    group, found = group_of_ranks(), []
    checkpoint = Checkpointing(every_updates=3, asynchronous=False)
    kept: dict[str, Any] = {} if folder is None else {"folder": Path(folder), "checkpoint": checkpoint}
    for setting in settings:
        mesh = None if group is None or stages == 1 else Mesh.of(group, pipeline=stages)
        model = Net() if mesh is None else PipelineModel(Net(), mesh=mesh, schedule="1f1b")
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=grouped_optimizer(model, lr=LR, **SETTINGS[setting]),
            data=MapData(points(), global_batch_size=8, micro_batch_size=size, shuffle=False),
            updates=UPDATES,
            device="cpu",
            strategy=strategy_named(strategy, group if mesh is None else mesh.data),
            lr_schedule=PerGroup({"late": Listed(factors=((1, 1.0), (HALVED, 0.5)))}) if "two" in setting else None,
            train=Training(clip_norm=CLIP, check_loss=False),
            hooks=[None if kill is None else KillAt(kill, int(os.environ.get("RANK", "0")))],
            log=evenstep.Logging(writers=()),
            **kept,
        )
        if folder is not None:
            trainer.resume("auto")
        trainer.train()
        state = trainer.state_dict()
        parameters = {name: one.flatten().tolist() for name, one in state["model"].items()}
        found.append((parameters, digest([state["model"], state["optimizer"]["state"]])))
    return found


def left(settings: list[str], strategy: str, stages: int, folder: str, kill: int) -> str:
    """What a rank says of the one that is killed."""
    try:
        trained(settings, strategy, stages, 2, folder, kill)
    except EvenstepError as error:
        return str(error)
    raise AssertionError(f"the run was to end at update {kill}")
