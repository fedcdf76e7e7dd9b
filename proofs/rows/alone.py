"""A run whose ranks step alone, and the same in a few lines of float64: what `rows.local` compares.

The reference shares no code with the engine. It holds one network per rank, walks the samples in order, and has each
method's outer step as its paper defines it, on flat vectors.
"""

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from launched import group_of_ranks
from torch import Tensor, nn

import evenstep
from evenstep import Checkpointing, Ema, Hook, Local, MapData, Mesh, Ordered, PipelineModel, Trainer, Training
from evenstep.errors import LostRankError
from evenstep.events import UpdateBegin
from rows.killed import digest

UPDATES, EVERY, TOGETHER, SAVED = 22, 4, 5, 3  # the run ends in the midst of a period; updates between checkpoints
RATE, CLIP, DECAY = 0.05, 0.4, 0.8
SCALE, GROWTH = 2.0**520, 2  # a loss scale whose gradients' squares are too large for float64; updates until it doubles
FRAGMENT = 15  # elements of the first of two fragments: of the network's first matrix
LATE, OWN = 2, 0.25  # updates that a mean is on its way; share of a rank's own in what it takes

Step = Callable[[Tensor, float], Tensor]  # (the mean of the ranks, the inner rate) → what they go on with


def average(start: Tensor) -> Step:
    """Local SGD: the mean."""
    return lambda mean, rate: mean


def bmuf(eta: float, zeta: float, *, nesterov: bool) -> Callable[[Tensor], Step]:
    """Chen & Huo 2016: G = mean - what was begun with, Δ ← η·Δ + ζ·G, W ← W + Δ; Nesterov begins with W + η·Δ."""

    def begin(start: Tensor) -> Step:
        held = {"w": start, "begun": start, "delta": torch.zeros_like(start)}

        def step(mean: Tensor, rate: float) -> Tensor:
            held["delta"] = eta * held["delta"] + zeta * (mean - held["begun"])
            held["w"] = held["w"] + held["delta"]
            held["begun"] = held["w"] + eta * held["delta"] if nesterov else held["w"]
            return held["begun"]

        return step

    return begin


def slowmo(alpha: float, beta: float) -> Callable[[Tensor], Step]:
    """Wang et al. 2019: u ← β·u + (x - mean)/γ, x ← x - α·γ·u."""

    def begin(start: Tensor) -> Step:
        held = {"x": start, "u": torch.zeros_like(start)}

        def step(mean: Tensor, rate: float) -> Tensor:
            held["u"] = beta * held["u"] + (held["x"] - mean) / rate
            held["x"] = held["x"] - alpha * rate * held["u"]
            return held["x"]

        return step

    return begin


def diloco(start: Tensor) -> Step:
    """Douillard et al. 2023: torch's own SGD with Nesterov momentum, on θ - mean."""
    theta = start.clone().requires_grad_()
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)

    def step(mean: Tensor, rate: float) -> Tensor:
        theta.grad = theta.detach() - mean
        outer.step()
        return theta.detach().clone()

    return step


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Step]]] = {
    "SGD": ({}, average),
    "SGD after updates together": ({"synchronous_updates": TOGETHER}, average),
    "BMUF": ({"outer_lr": 1.2, "outer_momentum": 0.6}, bmuf(0.6, 1.2, nesterov=False)),
    "BMUF, Nesterov": ({"outer_momentum": 0.75, "nesterov": True}, bmuf(0.75, 1.0, nesterov=True)),
    "SlowMo": ({"outer_lr": 0.9, "outer_momentum": 0.7, "by_inner_rate": True}, slowmo(0.9, 0.7)),
    "DiLoCo": (DILOCO, diloco),
    "streaming DiLoCo": ({"fragments": 2, "overlap_updates": LATE, "own_share": OWN, **DILOCO}, diloco),
}


class Square(evenstep.Task):
    """The squared distance to the label."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class KillAt(Hook):
    """Kills one rank as an update begins, without a chance to tidy up."""

    def __init__(self, update: int) -> None:
        self._update = update

    def before_update(self, event: UpdateBegin) -> None:
        if event.update == self._update and not self.trainer.is_first_rank:
            os.kill(os.getpid(), signal.SIGKILL)


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double()) for _ in range(24)
    ]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def trained(
    method: str, folder: str | None = None, kill: int | None = None, *, scaled: bool = False, stages: int = 1
) -> Any:
    """What the ranks share at the end, its average, what this rank holds, and a sha256 of all that training changes.

    What a replica in stages holds is what all its ranks hold.

    Args:
        folder: of a run that is saved, and gone on with.
        kill: the update at whose beginning all ranks but the first are killed.
        scaled: whether losses are scaled, by each rank as its gradients allow: powers of 2, which round nothing.
        stages: of each replica's model.
    """
    group = group_of_ranks()
    mesh = Mesh.of(group, pipeline=stages)
    model = network() if stages == 1 else PipelineModel(network(), mesh=mesh, split_at=["2"])
    mixed = evenstep.Fp16Mixed(initial=SCALE, growth_updates=GROWTH)
    checkpoint = Checkpointing(every_updates=SAVED, asynchronous=False)
    kept: dict[str, Any] = {} if folder is None else {"folder": Path(folder), "checkpoint": checkpoint}
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        data=MapData(points(), global_batch_size=8, micro_batch_size=1, shuffle=False),
        updates=UPDATES,
        device="cpu",
        strategy=Local(Ordered(mesh.data), every_updates=EVERY, **METHODS[method][0]),
        lr_schedule={"kind": "linear", "end_factor": 0.1},
        precision=mixed if scaled else "32-true",
        train=Training(clip_norm=CLIP, check_loss=False, ema=Ema(decay=DECAY)),
        hooks=[None if kill is None else KillAt(kill)],
        log=evenstep.Logging(writers=()),
        **kept,
    )
    if folder is not None:
        trainer.resume("auto")
    trainer.train()
    own = digest([flat(model), trainer.optimizer.state_dict()["state"]])
    state = trainer.state_dict()
    mine = [torch.cat([one.flatten() for one in state[part].values()]) for part in ("model", "ema")]
    shared, average = group.gather(mine)[0]  # the first rank has all stages
    held = torch.cat(mesh.pipeline.gather(flat(model)))
    if scaled and len(set(group.gather(mixed.scale))) == 1:
        raise RuntimeError("the ranks were to come to different loss scales")
    return shared.tolist(), average.tolist(), held.tolist(), digest([shared, average, *group.gather(own)])


class Shift(nn.Module):
    """Adds a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def every_update(*, alone: bool, stages: int = 1) -> str:
    """A sha256 of plain SGD's parameters after updates in which no number is rounded: shared each time, or by ddp."""
    group, line = group_of_ranks(), nn.Linear(1, 1)
    mesh = Mesh.of(group, pipeline=stages)
    with torch.no_grad():
        line.weight.fill_(0.5)
        line.bias.fill_(0.25)
    whole = nn.Sequential(line, Shift()).double()
    model = whole if stages == 1 else PipelineModel(whole, mesh=mesh)
    numbers = [(torch.tensor([float(n % 5 - 2)]).double(), torch.tensor([float(n % 3)]).double()) for n in range(24)]
    Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1 / 16),
        data=MapData(numbers, global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=6,
        device="cpu",
        strategy=Local(Ordered(mesh.data), every_updates=1) if alone else Ordered(mesh.data),
        train=Training(check_loss=False),
        log=evenstep.Logging(writers=()),
    ).train()
    return digest(torch.cat(mesh.pipeline.gather(flat(model))))


def left(method: str, folder: str, kill: int, *, scaled: bool = False, stages: int = 1) -> str:
    """What a rank says of the one that is killed."""
    try:
        trained(method, folder, kill, scaled=scaled, stages=stages)
    except LostRankError as error:
        return str(error)
    raise AssertionError(f"the run was to end at update {kill}")


def by_hand(method: str, ranks: int) -> tuple[list[float], list[float], list[list[float]]]:
    """What the ranks share after the same updates, its average, and what each of them holds."""
    settings, outer = METHODS[method]
    together = settings.get("synchronous_updates", 0)
    models = [network() for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=RATE) for model in models]
    x, y = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    shared, averaged, steps, sent = flat(models[0]), flat(models[0]), [], {}
    borders = [0, FRAGMENT, len(shared)] if "fragments" in settings else [0, len(shared)]
    parts = [slice(*pair) for pair in pairwise(borders)]
    late, own = settings.get("overlap_updates", 0), settings.get("own_share", 0.0)
    for update in range(1, UPDATES + 1):
        rate = RATE * (1 - 0.9 * (update - 1) / (UPDATES - 1))
        begin = (update - 1) % 3 * 8
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            size = 8 if update <= together else 8 // ranks
            first = begin if update <= together else begin + rank * size
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            (((model(x[first : first + size]) - y[first : first + size]) ** 2).sum() / size).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        if update <= together:
            shared = flat(models[0])
        elif not steps:
            steps = [outer(shared[part]) for part in parts]
        for number, part in enumerate(parts if update > together else ()):
            if (update - together - EVERY * number // len(parts)) % EVERY == 0:
                sent[number, update + late] = torch.stack([flat(model)[part] for model in models]).mean(0)
            mean = sent.pop((number, update), None)
            if mean is None:
                continue
            shared = shared.clone()
            shared[part] = steps[number](mean, rate)
            for model in models:
                held = flat(model)
                held[part] = own * held[part] + (1 - own) * shared[part]
                nn.utils.vector_to_parameters(held, model.parameters())
        averaged = DECAY * averaged + (1 - DECAY) * shared
    return shared.tolist(), averaged.tolist(), [flat(model).tolist() for model in models]
