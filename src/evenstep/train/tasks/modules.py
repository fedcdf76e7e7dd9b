"""Modules and parameters of tasks as a part of the model: below `task_parameters`, by their names in the task."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import share_contents, unwrapped
from evenstep.pipeline import PipelineModel
from evenstep.tensors import TASK_PARAMETERS, parameters_in
from evenstep.train.tasks.task import IN_MODEL, Task


class TaskModules(nn.Identity):
    """Holds modules of tasks; harmless in an `nn.Sequential`, which runs all of its parts."""


@contextmanager
def attached(model: nn.Module, tasks: Mapping[str, Task], optimizer: Optimizer) -> Generator[None]:
    """Attach the modules of tasks; detach them if the block raises."""
    attach_modules(model, tasks, {id(one) for one in parameters_in(optimizer)})
    try:
        yield
    except BaseException:
        _detach(unwrapped(model))
        raise


def attach_modules(model: nn.Module, tasks: Mapping[str, Task], held: Collection[int] | None = None) -> None:
    """Make modules and parameters of tasks a part of the model, which trains, averages, moves and saves them.

    Not attached are modules of whose parameters the optimizer holds none, such as a frozen network or the other half of
    a GAN. A module without parameters is attached for its buffers, except beside a model in stages.

    Args:
        held: `id` of each parameter of the optimizer; None if it is built later, of all that are not frozen.

    Raises:
        ArgumentError: a module that the optimizer holds in part, or a parameter of a task beside a model in stages.
    """
    whole = unwrapped(model)
    _detach(whole)
    own = {id(one) for one in (*whole.parameters(), *whole.buffers())}
    everything = TaskModules()
    for name, task in tasks.items():
        part = _part_of(task, own, held)
        if [*part.parameters(), *part.buffers()]:
            if name:
                everything.add_module(name, part)
            else:
                everything = part
    names = [name for name, _ in everything.named_parameters()]
    if isinstance(whole, PipelineModel):
        if names:
            raise ArgumentError(
                f"a task has the parameter `{names[0]}`, but only the last stage computes losses: make it a part of "
                f"that stage's layers, freeze it, or train without stages.",
                field=names[0],
            )
        for task in tasks.values():
            vars(task).pop(IN_MODEL, None)
        return
    for part in everything.modules():
        part.__dict__["stays_float32"] = True  # also in a model of 16 bits: a loss is computed in float32
    for parameter in everything.parameters():
        vars(cast("Any", parameter))["stays_whole"] = True  # also on shards: no forward gathers it
    if [*everything.parameters(), *everything.buffers()]:
        whole.add_module(TASK_PARAMETERS, everything)


def _part_of(task: Task, own: Collection[int], held: Collection[int] | None) -> TaskModules:
    part = TaskModules()
    vars(task).pop(IN_MODEL, None)
    if isinstance(task, nn.Module):
        if _is_taken(task, type(task).__name__, own, held):
            share_contents(part, task)
            vars(task)[IN_MODEL] = True
        return part
    for name, value in vars(task).items():
        named = f"{type(task).__name__}.{name}"
        if isinstance(value, nn.Module | nn.Parameter) and _is_taken(value, named, own, held):
            setattr(part, name, value)
    return part


def _is_taken(value: nn.Module | nn.Parameter, name: str, own: Collection[int], held: Collection[int] | None) -> bool:
    parameters = [*value.parameters()] if isinstance(value, nn.Module) else [value]
    buffers = [*value.buffers()] if isinstance(value, nn.Module) else []
    if any(id(one) in own for one in (*parameters, *buffers)):
        return False  # a part of the model that the task uses
    trained = [one for one in parameters if one.requires_grad]
    if held is None or not parameters:
        return bool(trained or (buffers and not parameters))
    is_held = any(id(one) in held for one in parameters)
    if any(id(one) not in held for one in trained) and (is_held or isinstance(value, nn.Parameter)):
        raise ArgumentError(
            f"the task trains `{name}`, but the optimizer does not hold all of it: build it of "
            f"`[*model.parameters(), *task.NAME.parameters()]`, or freeze it by `requires_grad_(False)`.",
            field=name,
        )
    return is_held


def _detach(model: nn.Module) -> None:
    if isinstance(getattr(model, TASK_PARAMETERS, None), TaskModules):
        delattr(model, TASK_PARAMETERS)
