"""Runs in which a hook of the first rank does what all ranks must do together."""

import time
from collections.abc import Callable
from typing import Any

import torch
from launched import group_of_ranks, strategy_named
from torch import Tensor, nn

from evenstep import Engine, Evaluate, Hook, Logging, MapData, Task, Trainer
from evenstep.errors import EvenstepError
from evenstep.events import UpdateEnd

TIMEOUT_S = 40.0
POINTS = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor([n / 8])) for n in range(8)]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class AtSecond(Hook):
    """Does something after the second update."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == 2:
            self.act(self.trainer)


class Alone(AtSecond):
    first_rank_only = True


class Writes(AtSecond):
    """The way that the error says: all ranks do it, and the first writes."""

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == 2:
            found = self.act(self.trainer)
            if self.trainer.is_first_rank:
                written.append(found)


written: list[Any] = []


def forward(trainer: Any) -> float:
    with torch.no_grad():
        return float(trainer.model(torch.ones(1, 4)).sum())


def norm(trainer: Any) -> float:
    named = dict(trainer.model.named_parameters())
    return float(trainer.norms({name: one.detach() for name, one in named.items()})["0.weight"])


def if_first(trainer: Any) -> None:
    if trainer.is_first_rank:
        trainer.evaluate("valid")


CASES: dict[str, tuple[str, Callable[..., Hook], Callable[[Any], object]]] = {
    "a forward of shards": ("fsdp", Alone, forward),
    "an evaluation": ("ddp", Alone, lambda trainer: trainer.evaluate("valid")),
    "a norm of shards": ("fsdp", Alone, norm),
    "a forward of copies": ("ddp", Alone, forward),
    "a forward of shards by all": ("fsdp", Writes, forward),
    "an evaluation by all": ("fsdp", Writes, lambda trainer: trainer.evaluate("valid")),
    "an evaluation if this is the first": ("ddp", AtSecond, if_first),
}


def outcome(case: str) -> tuple[Any, bool, int]:
    """How a run ends, by its updates or its error; whether before ranks give each other up; how much is written."""
    kind, make, act = CASES[case]
    group = group_of_ranks(5.0 if act is if_first else TIMEOUT_S)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(POINTS, global_batch_size=4, micro_batch_size=2),
        evaluations={"valid": MapData(POINTS, global_batch_size=4)},
        updates=4,
        device="cpu",
        strategy=strategy_named(kind, group),
        hooks=[make(act), Evaluate(every_updates=4)],
        log=Logging(writers=()),
    )
    began = time.monotonic()
    try:
        ended: Any = trainer.train().update
    except EvenstepError as error:
        ended = f"{type(error).__name__}: {error}"
    at_once = time.monotonic() - began < TIMEOUT_S / 2
    group.close()  # as at a script's end: who holds the others' store leaves when they know why it fails
    return ended, at_once, len(written)


USES: dict[str, Callable[[Engine, Any, Any], object]] = {
    "state_dict": lambda engine, outcome, batch: engine.state_dict(),
    "evaluate": lambda engine, outcome, batch: engine.evaluate(batch),
    "metrics": lambda engine, outcome, batch: outcome.metrics(),
}


def of_engine(kind: str, use: str) -> str:
    """What the loop of one's own is told in which the first rank alone does something between two updates."""
    group, batch = group_of_ranks(TIMEOUT_S), (torch.ones(2, 4), torch.ones(2, 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = Engine(model, Square(), optimizer, strategy=strategy_named(kind, group), device="cpu")
    outcome = engine.update(batch)
    try:
        if group.rank == 0:
            USES[use](engine, outcome, batch)
        engine.update(batch)
    except EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return ""
