"""One small run, with faults in it, on one or several ranks; and what it ends at."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from injector import Chain, Fault, Hidden, Place, Points, Square, Sum, Where
from torch import Tensor, nn

import evenstep
from evenstep.events import Incident
from evenstep.parallel import Ddp, Fsdp, Group, Mesh, Reducer, Single, Strategy, Zero1
from evenstep.pipeline import PipelineModel
from evenstep.process import stopping
from kit import Heard


class SmallReducer(Reducer):
    """Puts one parameter in each bucket: some are away when a fault strikes."""

    bucket_bytes = 64


class SmallBuckets(Ddp):
    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return SmallReducer(module, self.group, ordered=self.is_ordered)


STRATEGIES: dict[str, Callable[[Group], Strategy]] = {
    "single": Single,
    "fast": partial(Single, reduction="fast"),
    "ordered": Ddp,
    "ddp": partial(Ddp, reduction="fast"),
    "zero1": lambda group: Zero1(group, reduction="fast"),
    "zero1-ordered": lambda group: Zero1(group),
    "fsdp": partial(Fsdp, reduction="fast"),
    "ordered-fsdp": Fsdp,
    "fsdp-copies": lambda group: Fsdp(group, shard_ranks=1, reduction="fast"),
    "fsdp-hybrid": lambda group: Fsdp(group, shard_ranks=2, reduction="fast"),
    "ddp-buckets": lambda group: SmallBuckets(group, reduction="fast"),
}
UPDATES = 6


@dataclass(slots=True)
class Ended:
    """How one rank of a run ended."""

    parameters: Tensor
    buffers: list[Tensor]
    incidents: list[Incident]
    error: Exception | None
    trainer: evenstep.Trainer
    update: int = field(init=False)

    def __post_init__(self) -> None:
        self.update = self.trainer.progress.update

    @property
    def kinds(self) -> list[str]:
        return [incident.kind for incident in self.incidents]


def train(
    group: Group | None = None,
    faults: Sequence[Fault] = (),
    *,
    strategy: str = "single",
    updates: int = UPDATES,
    micro: int = 4,
    norm: bool = False,
    folder: Path | None = None,
    data: dict[str, Any] | None = None,
    fail: Callable[[int], None] | None = None,
    hooks: Sequence[evenstep.Hook] = (),
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip_norm: float | None = 1.0,
    check_loss: bool = True,
    writers: Sequence[evenstep.Writer] = (),
    resume: bool = False,
    new_settings: bool = False,
    samples: int = 48,
    pipeline: int = 1,
    schedule: str = "1f1b",
    stoppable: bool = False,
    **more: Any,
) -> Ended:
    """Train one rank to the end, or to its error."""
    group = group or Group()
    place = Place(group.rank, faults=list(faults))
    model: nn.Module = Chain(place, norm=norm)
    shared = group
    if pipeline > 1:
        mesh = Mesh.of(group, pipeline=pipeline)
        shared = mesh.data
        layers = [*(Hidden(place, number) for number in range(5)), Sum()]
        model = PipelineModel(layers, mesh=mesh, schedule=schedule)
    of_parameters = optimizer or partial(torch.optim.AdamW, lr=0.05)
    hear = Heard()
    trainer = evenstep.Trainer(
        model=model,
        task=Square(place),
        optimizer=of_parameters(list(model.parameters())),
        data=evenstep.MapData(Points(samples, fail), global_batch_size=16, micro_batch_size=micro, **(data or {})),
        updates=updates,
        device="cpu",
        strategy=STRATEGIES[strategy](shared),
        hooks=[Where(place, shared.rank, shared.ranks), *hooks, hear],
        train=evenstep.Training(clip_norm=clip_norm, check_loss=check_loss),
        folder=folder,
        log=evenstep.Logging(every_updates=1, writers=writers),
        **more,
    )

    def transfer(batch: Any) -> Any:
        if model.training:
            place.strike("transfer", len(batch[0]))
        return batch

    object.__setattr__(trainer._loop.engine.parts.context, "transfer", transfer)  # on a CPU there is nothing to move
    error = None
    try:
        if resume:
            trainer.resume("auto", new_settings=new_settings)
        with stopping(trainer.request_stop) if stoppable else nullcontext():
            trainer.train()
    except Exception as raised:  # noqa: BLE001 - what it was is looked at by the test
        error = raised
        getattr(group, "fail", lambda message: None)(f"{type(raised).__name__}: {raised}")
    held = [getattr(one, "_local_tensor", one).detach().flatten() for one in model.parameters()]  # whole or a shard
    parameters = torch.cat(held) if held else torch.empty(0)
    return Ended(parameters, [buffer.clone() for buffer in model.buffers()], hear.incidents, error, trainer)
