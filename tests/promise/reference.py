"""A run of the battery as a plain loop in float64, which shares no code with the engine."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from promise_models import LISTS
from promise_runs import COEFFICIENTS, IGNORED, OPTIONS, SIZES, Run, loss_sum, sentences
from torch import Tensor, nn

DECAY = 0.9


def lr_factor(run: Run, update: int) -> float:
    """Factor of the learning rates in an update, by the formulas of the schedules."""
    if run.lr_schedule == "warmup":
        return min(1.0, update / 3)
    if run.lr_schedule == "cosine":
        if update <= 2:
            return update / 2
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (update - 2) / (run.updates - 2))) / 2
    return 1.0


def model_of(run: Run) -> nn.Module:
    torch.manual_seed(0)
    layers = LISTS[run.model](0.0)
    if run.model == "tied":
        layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def optimizers_of(run: Run, model: nn.Module) -> list[torch.optim.Optimizer]:
    """An optimizer for each parameter by itself."""
    made: list[torch.optim.Optimizer] = []
    for name, parameter in model.named_parameters():
        kind, options = "AdamW", dict[str, Any](lr=0.02)
        if run.optimizer == "groups":
            parameter.requires_grad_(not name.startswith("0."))
            options |= {"lr": 0.04, "weight_decay": 0.0} if "norm" in name else {"weight_decay": 0.1}
        elif run.optimizer == "Muon":
            kind = "Muon" if "linear" in name and parameter.ndim == 2 else "AdamW"
            options |= {} if parameter.ndim == 2 else {"weight_decay": 0.0}
        else:
            kind, options = run.optimizer, OPTIONS[run.optimizer]
        if parameter.requires_grad:
            made.append(getattr(torch.optim, kind)([parameter], **options))
    return made


def by_hand(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and their average after a run: each global batch whole, one backward per task."""
    model = model_of(run)
    average = copy.deepcopy(model)
    optimizers = optimizers_of(run, model)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    data = [sentences(run.samples, seed) for seed in range(len(run.tasks))]
    for update in range(1, run.updates + 1):
        model.zero_grad()
        for name, samples in zip(run.tasks, data, strict=True):
            begins = range(0, run.samples, SIZES[name])
            begin = begins[(update - 1) % len(begins)]
            batch = samples[begin : begin + SIZES[name]]
            words, targets = (torch.stack([sample[part] for sample in batch]) for part in (0, 1))
            loss = loss_sum(model(words), targets) / (targets != IGNORED).sum()
            (COEFFICIENTS[name] * loss).backward()
        if run.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
        for rate, optimizer in zip(rates, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = rate * lr_factor(run, update)
            optimizer.step()
        decay, passed = DECAY, update
        if run.ema == "late":
            decay, passed = (DECAY if update > 3 and update % 2 == 0 else 1.0), update // 2 - 1
        if update == 3 and run.ema == "late":
            average.load_state_dict(model.state_dict())
        elif decay < 1:
            decay = min(decay, (1 + passed) / (10 + passed))
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.copy_(decay * old + (1 - decay) * new)
    return dict(model.named_parameters()), dict(average.named_parameters())


def flat(values: Mapping[str, Any], names: Mapping[str, Any]) -> Tensor:
    return torch.cat([torch.as_tensor(np.asarray(values[name])).flatten() for name in names])


def distance(found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> float:
    """‖a - b‖₂ / ‖b‖₂ over all parameters."""
    plain = {name: value.detach() for name, value in wanted.items()}
    one, other = flat(found, plain), flat(plain, plain)
    return float((one - other).norm() / other.norm())


def share_of_way(run: Run, found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> float:
    """‖a - b‖₂ / ‖b - begin‖₂: the distance as a share of the way that the parameters went."""
    plain = {name: value.detach() for name, value in wanted.items()}
    begin = {name: value.detach() for name, value in model_of(run).named_parameters()}
    one, other, start = flat(found, plain), flat(plain, plain), flat(begin, plain)
    return float((one - other).norm() / (other - start).norm())
