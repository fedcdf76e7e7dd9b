"""`compile = "update"`: an update as one compiled graph of forwards, backwards, norm, clip, optimizer and average.

It is for models so small that launching kernels takes most of the time. `check` and `build` are the seam of
`evenstep.train.build`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from evenstep.contrib.compiled_update.formulas import FORMULAS
from evenstep.contrib.compiled_update.update import CompiledUpdate, check_uncalled, refuse
from evenstep.events import Hook
from evenstep.internals import has_foreign_hooks
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
    refuse("the model is in stages", isinstance(model, PipelineModel))
    refuse("ranks share the model", type(parts.strategy) is not Single)
    name = parts.precision.name
    refuse(f"`precision` is '{name}', and not one of {', '.join(PRECISIONS)}", name not in PRECISIONS)
    kind = type(optimizer)
    refuse(f"the optimizer is {kind.__name__}, and not AdamW, Adam or SGD", kind not in FORMULAS)
    refuse("`lr` or `betas` of the optimizer is a tensor", any(isinstance(value, torch.Tensor) for value in options))
    wide = (torch.float32, torch.float64)
    refuse("parameters are not float32", any(one.dtype not in wide for one in parameters))
    refuse("a task has a late weight", any(task.late_weight for task in tasks.values()))
    refuse("a task uses the average", any(task.uses_average for task in tasks.values()))
    refuse("`coefficients` are learned", parts.coefficients.are_learned)
    refuse("`combine` keeps the tasks' gradients apart", parts.combine is not None)
    refuse("modules of the model have hooks", has_foreign_hooks(model))
    for name, part in model.named_modules():
        refuse(f"`{name}` makes sparse gradients", getattr(part, "sparse", False) is True)
        counts = getattr(part, "track_running_stats", False) and getattr(part, "momentum", 0.0) is None
        refuse(f"`{name}` has no `momentum`, so a tensor says how much a batch counts", counts)
    check_uncalled(optimizer, parameters)


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise ArgumentError for a hook that listens to something inside of an update."""
    for hook in hooks:
        for name in _INSIDE:
            listens = getattr(getattr(hook, name), "__func__", None) is not getattr(Hook, name)
            refuse(f"hook `{hook.name}` has `{name}`, which no graph calls", listens)


def build(parts: Parts) -> CompiledUpdate:
    """The compiled update of an engine.

    Raises:
        ArgumentError: a hook listens to something inside of an update.
    """
    check_hooks(parts.context.bus.hooks)
    return CompiledUpdate(parts)
