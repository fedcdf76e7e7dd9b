"""What tests of quantisation share: a small run, and what is run on several ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn

from evenstep import (
    Checkpointing,
    Ema,
    Hook,
    Logging,
    MapData,
    Mesh,
    PipelineModel,
    Task,
    Trainer,
    Training,
)
from evenstep.contrib.qat import QuantizationAware
from evenstep.events import StepEvent, UpdateEvent
from evenstep.parallel import Strategy

POINTS = [
    (torch.randn(8, generator=(draw := torch.Generator().manual_seed(n))), torch.randn(2, generator=draw))
    for n in range(24)
]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(3)  # of its own: ranks that are threads share torch's
    with torch.no_grad():
        for one in model.parameters():
            one.uniform_(-0.4, 0.4, generator=generator)
    return model


def data_for(model: nn.Module, *, micro: int = 4) -> MapData:
    """The points in their order, in the format of the model."""
    dtype = next(model.parameters()).dtype
    points = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in POINTS]
    return MapData(points, global_batch_size=8, micro_batch_size=micro, shuffle=False)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, **options)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)


def trainer_of(
    model: nn.Module,
    hooks: Sequence[Hook],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    micro: int = 4,
    updates: int = 6,
    **more: Any,
) -> Trainer:
    """A trainer of a model that the hooks prepare."""
    for hook in hooks:
        hook.prepare(model)
    data = data_for(model, micro=micro)
    options: dict[str, Any] = {"task": Square(), "data": data, "evaluations": data, **more}
    return Trainer(
        model=model,
        optimizer=optimizer(model),
        updates=updates,
        device="cpu",
        hooks=hooks,
        checkpoint=Checkpointing(asynchronous=False),
        log=Logging(writers=()),
        **options,
    )


class StopAt(Hook):
    """Stops after an update; None: never."""

    def __init__(self, update: int | None) -> None:
        self._update = update

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == self._update:
            self.trainer.request_stop("test")


class SpoilOnce(Hook):
    """Saves update 1, and makes the gradient of update 5 not finite, once."""

    is_done = False

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 1:
            self.trainer.request_save()

    def after_step(self, event: StepEvent) -> None:
        if event.update == 4 and not self.is_done:
            self.is_done = True
            spoil(self.trainer.model)


def spoil(model: nn.Module) -> None:
    """Make the next loss, and so its gradient, not finite."""
    with torch.no_grad():
        model.get_parameter("4.bias").fill_(float("nan"))


def rounding() -> QuantizationAware:
    options = {"weight_dtype": "int4", "granularity": 8}
    return QuantizationAware("IntxWeightOnlyConfig", options=options, layers=("2", "4"), after_update=3)


def strategy_of(name: str, model: nn.Module, group: Any) -> Strategy:
    if isinstance(model, PipelineModel):
        return strategy_named(name.removeprefix("stages").lstrip("-") or "ordered", model.mesh.data)
    return strategy_named(name, group)


def quantized(strategy: str, *, stop: int | None = None, folder: str | None = None, group: Any = None) -> str:
    """Digest of parameters, average and optimizer after 6 updates."""
    model: nn.Module = net()
    if strategy.startswith("stages"):
        model = PipelineModel(model, mesh=Mesh.of(group, pipeline=2), split_at=["2"], schedule="zb_h1")
    trainer = trainer_of(
        model,
        [rounding(), StopAt(stop)],
        optimizer=adamw,
        micro=2,
        strategy=strategy_of(strategy, model, group),
        evaluations={},  # none
        folder=None if folder is None else Path(folder),
        train=Training(clip_norm=1.0, ema=Ema(decay=0.5)),
    )
    if folder is not None:
        trainer.resume()
    trainer.train()
    state = trainer.state_dict()  # all together
    return digest({part: state[part] for part in ("model", "ema")} | {"optimizer": state["optimizer"]["state"]})


def on_strategies(strategies: Mapping[str, Sequence[int]], folder: str) -> dict[str, set[str]]:
    """Digests on these ranks with each strategy, stopped and resumed at each of its updates."""
    group = group_of_ranks()
    results: dict[str, set[str]] = {}
    for strategy, stops in strategies.items():
        for stop in stops:
            own = f"{folder}/{strategy}-{stop}"
            quantized(strategy, stop=stop, folder=own, group=group)
            last = quantized(strategy, folder=own, group=group)
            results.setdefault(strategy, set()).add(last)
    return results
