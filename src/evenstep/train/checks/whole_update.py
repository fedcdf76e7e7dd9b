"""Which runs can have their whole update compiled (`compile = "update"`): asked when a run is built, and by `check`.

A graph holds what the model, the task's loss and the optimizer's formula make of tensors. Whatever must be told of
single micro-batches on the way, or is decided by what tensors hold, can't be in it; each such thing is refused here by
its name. All that is refused goes with `compile = "model"`, but for what says something else.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.events import Hook
from evenstep.internals import any_gradient_hooks, compiled_in_place, has_foreign_hooks, has_step_hooks, unwrapped
from evenstep.names import TASK_PARAMETERS, named_parameters, parameters_in
from evenstep.optim.formulas import FORMULAS
from evenstep.parallel import Ddp, Single, Strategy
from evenstep.parallel.buffers import running_statistics
from evenstep.parallel.compression import Compression
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import described
from evenstep.precision import Precision
from evenstep.train.compiled import check_compiler
from evenstep.train.failures.policies import Policies
from evenstep.train.tasks.tasks import Tasks

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
OPTIMIZERS = tuple(kind.__name__ for kind in FORMULAS)
_INSIDE = tuple(
    f"{side}_{part}" for part in ("microbatch", "forward", "backward", "step") for side in ("before", "after")
)


def check_whole_update(
    model: nn.Module,
    tasks: Tasks,
    optimizer: Optimizer,
    strategy: Strategy,
    precision: Precision,
    policies: Policies,
    device: torch.device,
) -> None:
    """Raise ArgumentError, by name, for what can't be in a compiled update; nothing is changed."""
    check_compiler(device, "update")
    check_kinds(
        precision=precision.name,
        optimizer=type(optimizer).__name__ if type(optimizer) not in FORMULAS else "SGD",
        strategy=_named(strategy),
        stages=isinstance(model, PipelineModel),
        non_finite="drop_task" if policies.non_finite.tolerates_errors else "stop",
        compresses=isinstance(strategy, Ddp) and type(strategy.compression) is not Compression,
        changes=strategy.group.can_change,
    )
    _check_tasks(tasks, model)
    _check_optimizer(optimizer)
    _check_model(model, strategy)


def check_kinds(
    *,
    precision: str,
    optimizer: str | None,
    strategy: str,
    stages: bool,
    non_finite: str,
    compresses: bool,
    changes: bool,
) -> None:
    """Raise ArgumentError for kinds of parts, by the names that run files give them, that no compiled update has.

    Args:
        optimizer: the name of its class; None where that is not known.
        strategy: "ordered" where sums have one order.
        non_finite: what is done about gradients that are not finite.
        changes: whether the run goes on with other ranks when some are lost.
    """
    refused = {
        f"the model is in stages (`pipeline`): {_IN_ONE}": stages,
        f"`strategy` is '{strategy}': a graph for each rank holds whole gradients, which one sum shares, as 'ddp' "
        f"does": strategy not in ("auto", "single", "ddp"),
        "gradients travel compressed (`compression`)": compresses,
        "ranks may come and go (`lost_rank`), which meet within an update": changes,
        f"`precision` is '{precision}', {_why_not(precision)}; {', '.join(PRECISIONS)} can": precision
        not in PRECISIONS,
        f"`optimizer` is {optimizer}, whose step is no formula here; those of torch's {', '.join(OPTIMIZERS)} "
        f"are": optimizer is not None and optimizer not in OPTIMIZERS,
        f"`non_finite` is '{non_finite}', which keeps what a task raises until all micro-batches have run": non_finite
        == "drop_task",
    }
    for what, is_so in refused.items():
        if is_so:
            raise _refusal(what)


def check_listeners(hooks: Iterable[Hook]) -> None:
    """Raise ArgumentError for a hook that is told of what happens inside of an update."""
    for hook in hooks:
        heard = [name for name in _INSIDE if getattr(getattr(hook, name), "__func__", None) is not getattr(Hook, name)]
        if heard:
            raise _refusal(
                f"hook `{hook.name}` has `{heard[0]}`, and within a graph nobody is told of micro-batches, or sees "
                f"`.grad`; leave it out"
            )


def check_still_capturable(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ArgumentError for hooks that have come since the run was built, and would not be called."""
    if has_step_hooks(optimizer):
        raise _refusal(
            "something is to be called with the optimizer's step (a hook on it, or `step` was replaced, as torch's LR "
            "schedulers do), which the graph takes by itself; set rates by `lr_schedule`, or in "
            "`optimizer.param_groups` in a hook"
        )
    if any_gradient_hooks(parameters):
        raise _refusal("a parameter has hooks on its gradient, which the graph would not call; remove them")


def check_shows_nothing(names: Sequence[str]) -> None:
    """Raise ArgumentError for texts, images and histograms that came with a loss, which a graph can't give."""
    if names:
        raise _refusal(
            f"the task's loss comes with `shown` ('{names[0]}'), which is no tensor; show it in a hook, in "
            f"`after_update` or `after_evaluate`"
        )


def _why_not(precision: str) -> str:
    if precision == "float8-mixed":
        return "whose linear layers have backwards of torchao's, which can't be followed within an update's gradient"
    return "with which the optimizer steps float32 weights that are not those that the model computes with"


_IN_ONE = "one graph holds the forward and backward of all layers"


def _refusal(what: str) -> ArgumentError:
    return ArgumentError(f"`compile` is 'update', but {what}. Change that, or set `compile` to 'model'.")


def _named(strategy: Strategy) -> str:
    if isinstance(strategy, Single | Ddp):
        return "single" if isinstance(strategy, Single) else "ddp"
    return type(strategy).__name__.lower()


def _check_tasks(tasks: Tasks, model: nn.Module) -> None:
    own = next((name for name in named_parameters(unwrapped(model)) if name.startswith(f"{TASK_PARAMETERS}.")), None)
    if own is not None:
        raise _refusal(f"a task trains `{own}`, which its loss takes from elsewhere than the graph's arguments")
    for name, task in tasks.by_name.items():
        what = f"task `{name}`" if name else "the task"
        if task.late_weight:
            raise _refusal(f"{what} has `late_weight`: what the gradient is divided by would be known only after it")
        if task.uses_average:
            raise _refusal(f"{what} has `uses_average`: the average is asked by another pass of the model")
    if tasks.coefficients.are_learned:
        raise _refusal(f"`coefficients` are learned ({type(tasks.coefficients).__name__})")
    if tasks.combine is not None:
        raise _refusal("`combine` keeps the gradients of the tasks apart")


def _check_optimizer(optimizer: Optimizer) -> None:
    groups: list[dict[str, Any]] = optimizer.param_groups
    for number, group in enumerate(groups):
        held = [name for name in ("lr", "betas") if _has_tensor(group.get(name))]
        if held:
            raise _refusal(f"`{held[0]}` of the optimizer's group {number} is a tensor; give a number")
    parameters = parameters_in(optimizer)
    odd = next((one.dtype for one in parameters if one.dtype not in (torch.float32, torch.float64)), None)
    if odd is not None:
        raise _refusal(f"the optimizer holds parameters of {format_name(odd)}; it takes float32 ones")
    check_still_capturable(optimizer, parameters)


def _has_tensor(value: object) -> bool:
    return any(isinstance(one, torch.Tensor) for one in (value if isinstance(value, tuple) else (value,)))


def _check_model(model: nn.Module, strategy: Strategy) -> None:
    for name, part in model.named_modules():
        if unwrapped(part) is not part or compiled_in_place(part):
            raise _refusal(f"{described(name, part)} is compiled already; give the model as it is written")
        if isinstance(part, torch.jit.ScriptModule):
            raise _refusal(f"{described(name, part)} was compiled by `torch.jit`")
        if getattr(part, "sparse", False) is True:
            raise _refusal(f"{described(name, part)} makes sparse gradients; build it without `sparse=True`")
        if getattr(part, "track_running_stats", False) and getattr(part, "momentum", 0.0) is None:
            raise _refusal(
                f"{described(name, part)} has no `momentum`, so how much a batch counts is read from a tensor; give it "
                f"one, 0.1 is usual"
            )
    if has_foreign_hooks(model):
        raise _refusal("modules of the model have hooks, which are called at each micro-batch; remove them")
    if strategy.ranks > 1:
        if running_statistics(model):
            raise _refusal(
                "the model has running statistics (BatchNorm), which several ranks make equal between the passes and "
                "the step; train in one process, or with GroupNorm or LayerNorm"
            )
        if len({one.dtype for one in named_parameters(model).values()}) > 1:
            raise _refusal("parameters are of several number formats, while one sum shares all gradients")
