"""What a run of the battery may have besides: parameter groups, averages, fake quantisation.

A kit changes the model before its optimizer is built. What it does at set updates it does after the third and fourth,
around which faults strike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep import ParameterGroup, grouped_optimizer
from evenstep.contrib.qat import QuantizationAware

LR = 0.05
SET = 3  # after this update something changes, and once more after the next


def adamw(model: nn.Module, **grouping: Any) -> torch.optim.Optimizer:
    options = {"weight_decay": 0.1, "foreach": True}
    return grouped_optimizer(model, torch.optim.AdamW, lr=LR, options=options, **grouping)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the layers' matrices, AdamW for the rest, and a frozen bias."""
    groups = {
        "matrices": ParameterGroup(
            patterns=("layers.*.weight",), optimizer=torch.optim.Muon, lr=0.02, options={"weight_decay": 0.01}
        ),
        "still": ParameterGroup(patterns=("layers.1.linear.bias",), frozen=True),
    }
    return grouped_optimizer(model, torch.optim.AdamW, lr=LR, groups=groups, weight_decay_on="matrices")


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    groups = {"head": ParameterGroup(patterns=("head.*",), lr_factor=3.0)}
    return adamw(model, groups=groups, weight_decay_on="matrices")


def rounding() -> QuantizationAware:
    options = {"weight_dtype": "int4", "granularity": 3}
    return QuantizationAware("IntxWeightOnlyConfig", options=options, layers=("layers.*",), after_update=SET)


class Thaw(evenstep.Hook):
    """Freezes the head, and lets it be trained again after the third update."""

    def before_update(self, event: Any) -> None:
        for name, one in self.trainer.model.named_parameters():
            if name.startswith("head"):
                one.requires_grad_(event.update > SET)


@dataclass(frozen=True, slots=True)
class Kit:
    """What a run has besides.

    Args:
        optimizer: of the model.
        hooks: made anew for each rank; one that has a `prepare` is given the model first.
        train: arguments of `Training`.
        dtype: of the model; torchao rounds no float64.
    """

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    hooks: Sequence[Callable[[], Any]] = ()
    train: Mapping[str, Callable[[], Any]] = field(default_factory=dict[str, Callable[[], Any]])
    dtype: torch.dtype = torch.float64

    def made(self, model: nn.Module) -> tuple[torch.optim.Optimizer, list[evenstep.Hook], dict[str, Any]]:
        model.to(self.dtype)
        hooks = [hook() for hook in self.hooks]
        for hook in hooks:
            getattr(hook, "prepare", lambda model: None)(model)
        return self.optimizer(model), hooks, {name: make() for name, make in self.train.items()}


AVERAGE = {"ema": partial(evenstep.Ema, decay=0.7, start_update=1, decay_warmup=True, evaluated="both")}
KITS = {
    "Muon and AdamW": Kit(muon, train=AVERAGE),
    "decay by layer": Kit(decayed),
    "averages": Kit(adamw, train=AVERAGE),
    "what is frozen at first": Kit(adamw, (Thaw,), AVERAGE),
    "fake quantisation": Kit(adamw, (rounding,), AVERAGE, dtype=torch.float32),
}
