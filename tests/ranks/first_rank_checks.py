"""What two real processes do where a hook of the first rank does what all must do; `test_first_rank.py` reads it."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Evaluate, Hook, Logging, MapData, Task, Trainer
from evenstep.errors import EvenstepError
from evenstep.events import UpdateEnd
from evenstep.parallel import Ddp, Fsdp, Processes

TIMEOUT_S = 8.0
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
}


def outcome(group: Processes, kind: str, make: Callable[..., Hook], act: Callable[[Any], object]) -> list[Any]:
    """How a run ends: its updates or its error, and whether that was known well before ranks give each other up."""
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
        strategy=Fsdp(group) if kind == "fsdp" else Ddp(group),
        hooks=[make(act), Evaluate(every_updates=4)],
        log=Logging(writers=()),
    )
    began = time.monotonic()
    try:
        ended: Any = trainer.train().update
    except EvenstepError as error:
        ended = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    group.go_on()
    return [ended, took < TIMEOUT_S / 2]


def main() -> None:
    case = sys.argv[2]
    torch.set_num_threads(1)
    group = Processes("cpu", timeout_s=TIMEOUT_S)
    if case == "unknown":
        told = outcome(group, "ddp", AtSecond, if_first)
        sys.stdout.write(f"{json.dumps(told)}\n")
        return
    found = {name: outcome(group, *CASES[name]) for name in CASES}
    everybody = group.gather(found)
    if group.rank == 0:
        sys.stdout.write(f"{json.dumps([everybody, len(written)])}\n")
    group.close()


main()
