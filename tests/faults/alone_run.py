"""A run whose ranks step alone, may be lost and come back; and the same by hand, in a few lines of float64.

`elastic_run` starts the processes and calls `train_alone` in each; `by_hand` shares no code with the engine.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.checkpoint.writer import CheckpointWrite
from evenstep.events import Evaluate, JsonlWriter, Save
from evenstep.parallel import Ddp, Group, Local, Ordered
from evenstep.parallel.reducers import Reducers
from evenstep.parallel.shares import Shares

BATCH, SAMPLES, RATE, CLIP, DECAY = 12, 36, 0.05, 0.4, 0.8
# a loss scale whose gradients' squares are too large for float64: ranks lower it, and it rounds nothing
SCALE = 2.0**520
SAVED = 4  # updates between checkpoints
SETTINGS: dict[str, dict[str, Any]] = {
    "local SGD": {"every_updates": 3},
    "DiLoCo": {"every_updates": 3, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True, "synchronous_updates": 2},
    "fragments": {"every_updates": 4, "fragments": 2, "own_share": 0.25, "outer_momentum": 0.5},
    "streamed": {"every_updates": 4, "fragments": 2, "overlap_updates": 3, "own_share": 0.25, "outer_momentum": 0.5},
    "reset": {"every_updates": 3, "inner_state": "reset", "outer_momentum": 0.5},
}
FRAGMENT = 15  # elements of the first of two: of the first matrix


class Square(evenstep.Task):
    """The squared distance to the label."""

    def __init__(self, strike: Callable[[str], None]) -> None:
        self.strike = strike

    def loss(self, output: Any, batch: Any) -> Tensor:
        self.strike("evaluate" if not torch.is_grad_enabled() else "loss")
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.abs().sum(1) - 1


def network(number: int, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(
        *([nn.BatchNorm1d(3, affine=False, momentum=0.3)] if norm else []), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)
    ).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def struck(strike: Callable[[str], None]) -> None:
    """Let faults strike within what ranks do to share, and when all have promised to apply an update."""

    def before(owner: type, name: str, place: str) -> None:
        act = getattr(owner, name)
        setattr(owner, name, lambda *given: (strike(place), act(*given))[1])

    before(Shares, "_agree", "share")  # nothing was sent
    before(Shares, "_share_buffers", "mean")  # the mean has come
    before(Shares, "_arrive", "shared")  # buffers are shared as well
    promise = Reducers.promise
    Reducers.promise = lambda self: (promise(self), strike("promised"))[0]


def train_alone(
    group: Group, number: int, strike: Any, folder: Path, what: dict[str, Any], back: Callable[[], Any] | None
) -> None:
    """Train one process to its end, which it prints as a line of JSON."""
    struck(strike.now)
    if what["alone"].get("slow_save") is not None:
        write, slow_s = CheckpointWrite.write, what["alone"]["slow_save"]
        CheckpointWrite.write = lambda self: (time.sleep(slow_s), write(self))[1]
    model = network(number, norm=what.get("norm", False))
    replicas = (Ddp if what["alone"].get("fast") else Ordered)(group)
    x, y = points()
    micro = what["alone"].get("micro", 1 + what.get("norm", False))
    data = list(zip(x, y, strict=True))
    trainer = evenstep.Trainer(
        model=model,
        task=Square(strike.now),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        data=evenstep.MapData(data, global_batch_size=BATCH, micro_batch_size=micro, shuffle=False),
        evaluations={"valid": evenstep.MapData(data, global_batch_size=4, shuffle=False)},
        updates=what["updates"],
        device="cpu",
        strategy=Local(replicas, **SETTINGS[what["alone"]["settings"]]),
        lr_schedule={"kind": "linear", "end_factor": 0.1},
        hooks=[strike, Save(every_updates=SAVED), Evaluate(every_updates=5)],
        log=evenstep.Logging(writers=[JsonlWriter()], every_updates=2),
        folder=folder / what["alone"].get("run", "run"),
        train=evenstep.Training(clip_norm=CLIP, check_loss=False, ema=evenstep.Ema(decay=DECAY)),
        precision=evenstep.Fp16Mixed(initial=SCALE, growth_updates=2) if what["alone"].get("scaled") else "32-true",
        checkpoint=evenstep.Checkpointing(keep_last=None, asynchronous=what["alone"].get("asynchronous", False)),
    )
    if back is not None or what["alone"].get("resume"):
        trainer.resume("auto")
    if back is not None:
        back()
    error = ""
    try:
        trainer.train()
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    reducer = trainer._loop.engine.reducers.alone
    shared = torch.cat([reducer.shared[name].flatten() for name, _ in model.named_parameters()])
    average = trainer._loop.engine.held_tensors()["ema"]
    state = [one for each in trainer.optimizer.state.values() for one in each.values()]
    tensors = [flat(model), shared, *average.values(), *reducer.momentum.values(), *model.buffers(), *state]
    said = {
        "number": number,
        "update": trainer.progress.update,
        "sha256": hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest(),
        "error": error,
        "heard": strike.heard,
        "own": flat(model).tolist(),
        "shared": shared.tolist(),
        "average": [value for name, _ in model.named_parameters() for value in average[name].flatten().tolist()],
        "buffers": [value for one in model.buffers() for value in one.double().flatten().tolist()],
        "losses": {one.update: one.value for one in trainer.storage.history("train/loss")},
    }
    os.write(1, (json.dumps(said | {"ended": time.time()}) + "\n").encode())  # at once, so that lines do not mix


class Rank:
    """One process of the reference."""

    def __init__(self, updates: int, *, norm: bool) -> None:
        self.model, self.updates, self.piece = network(0, norm=norm), updates, 1 + norm
        self.begin_optimizer()

    def begin_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def gradient(self, rows: Sequence[int]) -> Tensor:
        x, y = points()
        pieces = [list(rows[at : at + self.piece]) for at in range(0, len(rows), self.piece)]
        total = torch.stack([((self.model(x[some]).squeeze(-1) - y[some]) ** 2).sum() for some in pieces]).sum()
        return torch.cat([one.flatten() for one in torch.autograd.grad(total, list(self.model.parameters()))])

    def step(self, gradient: Tensor, update: int) -> None:
        gradient = gradient * min(1.0, CLIP / (float(gradient.norm()) + 1e-6))
        self.optimizer.param_groups[0]["lr"] = RATE * (1 - 0.9 * (update - 1) / (self.updates - 1))
        sizes = [one.numel() for one in self.model.parameters()]
        for one, piece in zip(self.model.parameters(), gradient.split(sizes), strict=True):
            one.grad = piece.view_as(one).clone()
        self.optimizer.step()

    def take(self, values: Tensor, statistics: Sequence[Tensor]) -> None:
        nn.utils.vector_to_parameters(values.clone(), self.model.parameters())
        for mine, value in zip(self.model.buffers(), statistics, strict=True):
            mine.copy_(value)


Life = tuple[int, int]  # a process's number, and how many have had it before
KEYS = ("every_updates", "outer_lr", "outer_momentum")


def by_hand(
    settings: str,
    updates: int,
    there: Callable[[int], Sequence[Life]],
    shares: Callable[[int], Sequence[Life]],
    *,
    norm: bool = False,
    fast: bool = False,
) -> tuple[Tensor, Tensor, list[nn.Module]]:
    """What the ranks share after so many updates, its average, and the model of each that is there then.

    Args:
        there: who makes an update, in the order of their ranks: all its samples are dealt over them.
        shares: who of them is in the mean after it.
        norm: whether there are running statistics.
        fast: whether a mean on its way loses what a lost rank has sent, unless a save has waited for it.
    """
    given = {"outer_lr": 1.0, "outer_momentum": 0.0, "fragments": 1, "own_share": 0.0, **SETTINGS[settings]}
    together, every, eta, mu = given.get("synchronous_updates", 0), *map(given.get, KEYS)
    first_model = network(0, norm=norm)
    theta, statistics = flat(first_model), list(first_model.buffers())
    velocity, average = torch.zeros_like(theta), theta.clone()
    ranks: dict[Life, Rank] = {}
    sent: dict[int, tuple[int, dict[Life, Tensor], bool]] = {}  # by part: when it is due, of whom, whether it has come
    borders = [0, *([FRAGMENT] if given["fragments"] == 2 else []), len(theta)]
    for update in range(1, updates + 1):
        lives, first = there(update), (update - 1) % (SAMPLES // BATCH) * BATCH
        for life in set(lives) - ranks.keys():
            assert update == 1 or update > together, "whoever comes so early has the others' optimizer state"
            ranks[life] = Rank(updates, norm=norm)
            ranks[life].take(theta, statistics)
        ranks = {life: ranks[life] for life in lives}
        size = BATCH // len(lives)
        found = [one.gradient(range(first + i * size, first + (i + 1) * size)) for i, one in enumerate(ranks.values())]
        for one, gradient in zip(ranks.values(), found, strict=True):
            one.step(torch.stack(found).sum(0) / BATCH if update <= together else gradient / size, update)
        if update <= together:
            theta = flat(next(iter(ranks.values())).model)
        for part, (due, values, has_come) in sent.items():
            left = values if has_come else {life: value for life, value in values.items() if life in lives}
            sent[part] = due, left, has_come
        for part in range(given["fragments"]):
            cut = slice(borders[part], borders[part + 1])
            if update > together and not (update - together - part * every // given["fragments"]) % every:
                ranks = {life: ranks[life] for life in shares(update)}
                values = {life: flat(one.model)[cut] for life, one in ranks.items()}
                sent[part] = update + given.get("overlap_updates", 0), values, not fast
        for part in [part for part, (due, _, _) in sent.items() if due == update]:
            cut = slice(borders[part], borders[part + 1])
            step = theta[cut] - torch.stack(list(sent.pop(part)[1].values())).mean(0)
            velocity[cut] = mu * velocity[cut] + step
            theta[cut] = theta[cut] - eta * (step + mu * velocity[cut] if given.get("nesterov") else velocity[cut])
            moves = [
                torch.stack(list(column))
                for column in zip(*(one.model.buffers() for one in ranks.values()), strict=True)
            ]
            statistics = [
                then + ((now - then).mean(0) if now.is_floating_point() else (now - then).sum(0))
                for then, now in zip(statistics, moves, strict=True)
            ]
            for one in ranks.values():
                held = flat(one.model)
                held[cut] = given["own_share"] * held[cut] + (1 - given["own_share"]) * theta[cut]
                one.take(held, statistics)
                if given.get("inner_state") == "reset":
                    one.begin_optimizer()
        average = DECAY * average + (1 - DECAY) * theta
        if update % SAVED == 0:
            sent = {part: (due, values, True) for part, (due, values, _) in sent.items()}
    return theta, average, [one.model for one in ranks.values()]
