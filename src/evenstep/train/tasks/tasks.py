"""The tasks of a run by name: their states, their parts of the model, and their event methods."""

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, cast, final

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import said
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.events import Event, Hook
from evenstep.internals import children_of, share_contents, unwrapped
from evenstep.options import RESERVED, check_names
from evenstep.pipeline import PipelineModel
from evenstep.tensors import LEARNED, TASK_PARAMETERS
from evenstep.train.tasks.task import IN_MODEL, NOW, Now, Task
from evenstep.train.tasks.weighting import Coefficients, Combine

_EVENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_", "on_")))


def named(task: Task | Mapping[str, Task]) -> dict[str, Task]:
    """The tasks by name; one without a name has ""."""
    if isinstance(task, Task):
        return {"": task}
    if not isinstance(cast("object", task), Mapping) or not task:
        raise ArgumentError(f"`task` must be a Task, or tasks by name, but is {said(task)}.", field="task")
    check_names("task", map(str, task), RESERVED)
    return dict(task)


def states_of(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """The states of the tasks that may have one, by name."""
    states = {name: task.state_dict() for name, task in tasks.items()}
    return {name: one for name, one in states.items() if one or type(tasks[name]).state_dict is not Task.state_dict}


def check_task_states(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Raise CheckpointError unless the tasks that have a state are those whose state was saved."""
    lacking = [name for name, task in tasks.items() if name not in saved and task.state_dict()]
    unknown = [name for name, state in saved.items() if state and name not in tasks]
    for name in lacking + unknown:
        title, has = f"task `{name}`" if name else "the task", "no" if name in lacking else "a"
        raise CheckpointError(
            f"the checkpoint has {has} state of {title}, unlike this run; resume with the tasks that it was saved with."
        )


def attach_learned(
    model: nn.Module, optimizer: Optimizer, names: tuple[str, ...], coefficients: Coefficients, combine: Combine | None
) -> None:
    """Make what coefficients and `combine` learn a part of the model, which the optimizer trains without decay."""
    dtype = next(model.parameters()).dtype
    built = coefficients.build(names), None if combine is None else combine.build(names)
    for name, module in zip(LEARNED, built, strict=True):
        if module is None:
            continue
        module.to(torch.float64 if dtype == torch.float64 else torch.float32)
        _keep_wide(module)
        unwrapped(model).add_module(name, module)
        parameters = list(module.parameters())
        if parameters:
            decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.defaults else {}
            optimizer.add_param_group({"params": parameters, **decay})


def _keep_wide(module: nn.Module) -> None:
    for part in module.modules():
        part.__dict__["stays_float32"] = True  # also in a model of 16 bits: it is no part of its forward


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
    if TASK_PARAMETERS in children_of(whole):
        delattr(whole, TASK_PARAMETERS)
    own = {id(one) for one in (*whole.parameters(), *whole.buffers())}
    everything: nn.Module = nn.Identity()  # harmless in an `nn.Sequential`, which runs all of its parts
    for name, task in tasks.items():
        part = _part_of(task, own, held)
        if [*part.parameters(), *part.buffers()]:
            if name:
                everything.add_module(name, part)
            else:
                everything = part
    if isinstance(whole, PipelineModel):
        for name, _ in everything.named_parameters():
            raise ArgumentError(
                f"a task has the parameter `{name}`, but only the last stage computes losses: make it a part of "
                f"that stage's layers, freeze it, or train without stages.",
                field=name,
            )
        for task in tasks.values():
            vars(task).pop(IN_MODEL, None)
        return
    _keep_wide(everything)
    for parameter in everything.parameters():
        vars(cast("Any", parameter))["stays_whole"] = True  # also on shards: no forward gathers it
    if [*everything.parameters(), *everything.buffers()]:
        whole.add_module(TASK_PARAMETERS, everything)


def _part_of(task: Task, own: Collection[int], held: Collection[int] | None) -> nn.Module:
    part = nn.Identity()
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


def connect(engine: Any, tasks: Mapping[str, Any]) -> None:
    """Let `Task.now` of the tasks be the state of `engine`."""
    for task in tasks.values():
        vars(task)[NOW] = Now(weakref.ref(engine))


def task_hooks(tasks: Mapping[str, Any]) -> list[Hook]:
    """A hook for each task with event methods, such as `before_epoch`."""
    return [TaskHook(name, task) for name, task in tasks.items() if any(hasattr(task, event) for event in _EVENTS)]


@final
class TaskHook(Hook):
    """Calls the event methods of a task; of micro-batches only for its own."""

    failure_policy = "stop"

    def __init__(self, name: str, task: object) -> None:
        self._name = f"task {name or type(task).__name__}"
        for event in _EVENTS:
            if hasattr(task, event):
                setattr(self, event, _for_own_microbatches(name, getattr(task, event)))

    @property
    def name(self) -> str:
        return self._name


def _for_own_microbatches(task: str, method: Callable[[Event], object]) -> Callable[[Event], None]:
    @wraps(method)  # so that its random numbers are keyed as the method's
    def call(event: Any) -> None:
        if getattr(event, "task", task) == task:
            method(event)

    return call
