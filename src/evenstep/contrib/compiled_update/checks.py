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
    optimizer, tasks, model = parts.optimizer, parts.tasks, parts.model
    parameters = parameters_in(optimizer)
    groups: list[dict[str, Any]] = optimizer.param_groups
    options = [value for group in groups for value in (group["lr"], *group.get("betas", ()))]
    _refuse("the model is in stages", isinstance(model, PipelineModel))
    _refuse("ranks share the model", type(parts.strategy) is not Single)
    name = parts.precision.name
    _refuse(f"`precision` is '{name}', and not one of {', '.join(PRECISIONS)}", name not in PRECISIONS)
    kind = type(optimizer)
    _refuse(f"the optimizer is {kind.__name__}, and not AdamW, Adam or SGD", kind not in FORMULAS)
    _refuse("`lr` or `betas` of the optimizer is a tensor", any(isinstance(value, torch.Tensor) for value in options))
    wide = (torch.float32, torch.float64)
    _refuse("parameters are not float32", any(one.dtype not in wide for one in parameters))
    _refuse("a task has a late weight", any(task.late_weight for task in tasks.by_name.values()))
    _refuse("a task uses the average", any(task.uses_average for task in tasks.by_name.values()))
    _refuse("`coefficients` are learned", tasks.coefficients.are_learned)
    _refuse("`combine` keeps the tasks' gradients apart", tasks.combine is not None)
    _refuse("modules of the model have hooks", has_foreign_hooks(model))
    for name, part in model.named_modules():
        _refuse(f"`{name}` makes sparse gradients", getattr(part, "sparse", False) is True)
        counts = getattr(part, "track_running_stats", False) and getattr(part, "momentum", 0.0) is None
        _refuse(f"`{name}` has no `momentum`, so a tensor says how much a batch counts", counts)
    check_uncalled(optimizer, parameters)


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise ArgumentError for a hook that listens to something inside of an update."""
    for hook in hooks:
        for name in _INSIDE:
            listens = getattr(getattr(hook, name), "__func__", None) is not getattr(Hook, name)
            _refuse(f"hook `{hook.name}` has `{name}`, which no graph calls", listens)


def check_uncalled(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ArgumentError for hooks on the step or on gradients, which the graph would not call."""
    _refuse("the optimizer's step has hooks, or was replaced, as by torch's LR schedulers", has_step_hooks(optimizer))
    _refuse("a parameter has hooks on its gradient", any(map(has_gradient_hooks, parameters)))


def check_shows_nothing(names: Sequence[str]) -> None:
    """Raise ArgumentError for texts and images that came with a loss, which a graph can't give."""
    _refuse("the task's loss has `shown`", bool(names))


def _refuse(reason: str, applies: bool) -> None:
    if applies:
        raise ArgumentError(f"`compile` is 'update', but {reason}; set `compile` to 'model'.", field="compile")
