"""Refuses runs whose updates are no function of tensors: a graph would leave something out in silence."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.contrib.compiled_update.formulas import FORMULAS
from evenstep.errors import ArgumentError
from evenstep.events import Hook
from evenstep.internals import has_foreign_hooks, has_gradient_hooks, has_step_hooks
from evenstep.parallel import Single
from evenstep.pipeline import PipelineModel
from evenstep.tensors import parameters_in
from evenstep.train.build import Parts

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
_INSIDE = tuple(
    f"{side}_{part}" for part in ("microbatch", "forward", "backward", "step") for side in ("before", "after")
)


def check(parts: Parts) -> None:
    """Raise ArgumentError for a run whose updates can't be graphs."""
    optimizer, tasks = parts.optimizer, parts.tasks
    refused = {
        "the model is in stages": isinstance(parts.model, PipelineModel),
        "ranks share the model": type(parts.strategy) is not Single,
        f"`precision` is '{parts.precision.name}', and not one of {', '.join(PRECISIONS)}": parts.precision.name
        not in PRECISIONS,
        f"the optimizer is {type(optimizer).__name__}, and not AdamW, Adam or SGD": type(optimizer) not in FORMULAS,
        "a task has a late weight": any(task.late_weight for task in tasks.by_name.values()),
        "a task uses the average": any(task.uses_average for task in tasks.by_name.values()),
        "`coefficients` are learned": tasks.coefficients.are_learned,
        "`combine` keeps the tasks' gradients apart": tasks.combine is not None,
    }
    for reason, applies in refused.items():
        if applies:
            raise _refusal(reason)
    _check_optimizer(optimizer)
    _check_model(parts.model)


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise ArgumentError for a hook that listens to something inside of an update."""
    for hook in hooks:
        heard = [name for name in _INSIDE if getattr(getattr(hook, name), "__func__", None) is not getattr(Hook, name)]
        if heard:
            raise _refusal(f"hook `{hook.name}` has `{heard[0]}`, which no graph calls")


def check_uncalled(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ArgumentError for hooks on the step or on gradients, which the graph would not call."""
    if has_step_hooks(optimizer):
        raise _refusal("the optimizer's step has hooks, or was replaced, as by torch's LR schedulers")
    if any(map(has_gradient_hooks, parameters)):
        raise _refusal("a parameter has hooks on its gradient")


def check_shows_nothing(names: Sequence[str]) -> None:
    """Raise ArgumentError for texts and images that came with a loss, which a graph can't give."""
    if names:
        raise _refusal(f"the task's loss has `shown` ('{names[0]}')")


def _refusal(reason: str) -> ArgumentError:
    return ArgumentError(f"`compile` is 'update', but {reason}; set `compile` to 'model'.", field="compile")


def _check_optimizer(optimizer: Optimizer) -> None:
    parameters = parameters_in(optimizer)
    groups: list[dict[str, Any]] = optimizer.param_groups
    options = [value for group in groups for value in (group["lr"], *group.get("betas", ()))]
    if any(isinstance(value, torch.Tensor) for value in options):
        raise _refusal("`lr` or `betas` of the optimizer is a tensor")
    if any(one.dtype not in (torch.float32, torch.float64) for one in parameters):
        raise _refusal("the optimizer has parameters that are not float32")
    check_uncalled(optimizer, parameters)


def _check_model(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if getattr(part, "sparse", False) is True:
            raise _refusal(f"`{name}` makes sparse gradients")
        if getattr(part, "track_running_stats", False) and getattr(part, "momentum", 0.0) is None:
            raise _refusal(f"`{name}` has no `momentum`, so a tensor says how much a batch counts")
    if has_foreign_hooks(model):
        raise _refusal("modules of the model have hooks")
