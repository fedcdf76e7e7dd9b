"""The optimizer of a run: a class of `torch.optim`, or what the recipe names.

It decides only what the run file leaves open.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from evenstep.config.arguments import Call
from evenstep.config.faults import refused_at
from evenstep.config.schema import OptimizerTable, ParameterGroupTable
from evenstep.errors import ConfigError, EvenstepError, TaskError, clause
from evenstep.optim.groups import ParameterGroup
from evenstep.optim.sharing import NO_FUSED_SHARDS
from evenstep.tensors import TASK_PARAMETERS, named_parameters
from evenstep.train.checks import check_model
from evenstep.train.grouped import grouped_optimizer

_RAISED = (TypeError, ValueError, RuntimeError, LookupError)
"""What classes of torch raise of arguments that can't be: `betas=[0.9]` is an IndexError."""


def build_optimizer(
    call: Call, model: nn.Module, lr: float, *, fuse: bool = True, shards: bool = False
) -> torch.optim.Optimizer:
    """The optimizer: a class is called with the parameters that are trained, any other callable with the model.

    A class of `torch.optim` that can do its work in one fused kernel is told to, unless its arguments say otherwise:
    loss scale, clipping and the check for finite gradients then cost nothing extra.

    Args:
        call: what the run file names, with its arguments.
        lr: the peak learning rate.
        fuse: False where the bits of a step must not depend on how tensors are sharded, on a CPU.
        shards: whether each rank steps a part of every parameter, for which not all fused kernels are made.

    Raises:
        TaskError: there is nothing to train, or it is no optimizer.
        ConfigError: arguments that a class of torch does not take.
    """
    check_model(model)
    if isinstance(call.function, type):
        trained = _groups(model)
        with _refused_by_torch(call, "optimizer.args"):
            made: object = call(trained, lr=lr, **(_fused(call, model, shards) if fuse else {}))
    else:
        with refused_at("optimizer"):
            made = call(model, lr=lr)
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(
            f"`optimizer.target` must give a torch.optim.Optimizer, but gave a {type(made).__name__}.",
            field="optimizer.target",
        )
    return made


@contextmanager
def _refused_by_torch(call: Call, key: str) -> Generator[None]:
    try:
        yield
    except _RAISED as error:
        if isinstance(error, EvenstepError) or call.function.__module__.partition(".")[0] != "torch":
            raise
        raise ConfigError([f"`{key}`: {call.function.__name__} raised {clause(error)}."]) from error


def _groups(model: nn.Module) -> list[Any]:
    own, of_tasks = list[nn.Parameter](), list[nn.Parameter]()
    for name, one in named_parameters(model).items():
        if one.requires_grad:
            (of_tasks if name.startswith(f"{TASK_PARAMETERS}.") else own).append(one)
    if of_tasks:
        return [{"params": own}, {"params": of_tasks}]
    # a rank of a pipeline may have nothing to train, which optimizers take as an empty group only
    return own or [{"params": []}]


def build_grouped(
    calls: Mapping[str, Call], model: nn.Module, table: OptimizerTable, *, fuse: bool = True, shards: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of parameters in groups; arguments as of `build_optimizer`.

    Raises:
        ConfigError: groups that can't be, or arguments that a class of torch does not take.
    """
    check_model(model)
    call = calls["optimizer"]
    groups = {name: build_group(calls[f"optimizer.groups.{name}"], one) for name, one in table.groups.items()}
    kinds = {**{calls[key].function: calls[key] for key in calls if key.startswith(_GROUP)}, call.function: call}
    with refused_at("optimizer"), _refused_by_torch(call, "optimizer.groups"):
        return grouped_optimizer(
            model,
            cast("type[torch.optim.Optimizer]", call.function),
            lr=table.lr,
            groups=groups,
            weight_decay_on=table.weight_decay_on,
            layer_decay=table.layer_decay,
            layers=table.layers,
            options=call.arguments,
            options_of={cast("type", kind): _fused(one, model, shards) for kind, one in kinds.items()} if fuse else {},
        )


_GROUP = "optimizer.groups."


def build_group(call: Call, table: ParameterGroupTable) -> ParameterGroup:
    """One group, from its table."""
    own = table.name is not None or table.target is not None
    values = table.model_dump(exclude={"name", "target", "args", "lr_schedule"})
    kind = cast("type[torch.optim.Optimizer]", call.function) if own else None
    return ParameterGroup(**values, optimizer=kind, options=call.arguments)


def _fused(call: Call, model: nn.Module, shards: bool) -> dict[str, bool]:
    fusible = [
        kind
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        if not (shards and kind in NO_FUSED_SHARDS)
    ]
    decided = {"fused", "foreach", "capturable", "differentiable"} & call.arguments.keys()
    dense = all(
        one.is_floating_point() and torch.empty_like(one).stride() == one.stride() for one in model.parameters()
    ) and not any(getattr(module, "sparse", False) for module in model.modules())
    return {"fused": True} if call.function in fusible and not decided and dense else {}
