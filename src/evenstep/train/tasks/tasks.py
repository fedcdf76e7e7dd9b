"""The tasks of a run: their names, coefficients and states.

Learned coefficients become a part of the model, `task_coefficients` or `task_balance`: saved, averaged, clipped. So do
modules and parameters of tasks, below `task_parameters`, by their names in the task.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import said
from evenstep.errors import ArgumentError, CheckpointError, TaskError
from evenstep.internals import share_contents, unwrapped
from evenstep.options import RESERVED, NormStatistics, check_names
from evenstep.parallel.buffers import is_norm
from evenstep.pipeline import PipelineModel
from evenstep.tensors import LEARNED, TASK_PARAMETERS, parameters_in
from evenstep.train.tasks.task import IN_MODEL, Task
from evenstep.train.tasks.weighting import Coefficients, Combine, Fixed, Separate


class Tasks(NamedTuple):
    """The tasks of a run.

    Args:
        by_name: "" is the name of the only task of a run that has none.
        combine: the method for separate gradients, or None.
        norm_statistics: "frozen" keeps layers with running statistics in evaluation mode.
    """

    by_name: dict[str, Task]
    coefficients: Coefficients
    combine: Combine | None
    norm_statistics: NormStatistics

    @classmethod
    def of(
        cls,
        task: Task | Mapping[str, Task],
        coefficients: Coefficients | Mapping[str, float] | None,
        combine: Combine | None,
        norm_statistics: NormStatistics,
    ) -> Self:
        """The tasks from a trainer's arguments."""
        tasks = named(task)
        # a weight that comes late is divided by before the next task's gradient is added
        late = len(tasks) > 1 and any(one.late_weight for one in tasks.values())
        return cls(
            by_name=tasks,
            coefficients=coefficients if isinstance(coefficients, Coefficients) else Fixed(coefficients),
            combine=Separate() if combine is None and late else combine,
            norm_statistics=norm_statistics,
        )

    def attach(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, ...]:
        """Add learned coefficients to the model, and return the normalisation layers with frozen statistics."""
        names = tuple(self.by_name)
        built = (self.coefficients.build(names), None if self.combine is None else self.combine.build(names))
        for name, module in zip(LEARNED, built, strict=True):
            if module is not None:
                _attach(model, optimizer, name, module)
        if self.norm_statistics != "frozen":
            return ()
        return tuple(one for one in model.modules() if is_norm(one) and getattr(one, "running_mean", None) is not None)


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
    states = {name: _state_of(task, name) for name, task in tasks.items()}
    may_have = {name for name, task in tasks.items() if type(task).state_dict is not Task.state_dict}
    return {name: state for name, state in states.items() if state or name in may_have}


def check_task_states(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Raise CheckpointError unless the tasks that have a state are those whose state was saved."""
    now = {name for name, task in tasks.items() if _state_of(task, name)}
    faults = [f"has no state of {_title(name)}, which has some" for name in sorted(now - saved.keys())]
    faults += [
        f"has a state of {_title(name)}, which this run has not"
        for name, state in saved.items()
        if state and name not in tasks
    ]
    if faults:
        raise CheckpointError(f"the checkpoint {' and '.join(faults)}; resume with the tasks that it was saved with.")


def _state_of(task: Task, name: str) -> dict[str, Any]:
    state: Any = task.state_dict()
    if not isinstance(state, dict):
        raise TaskError(f"`state_dict` of {_title(name)} must give a dict, but gave {said(state)}.", field="state_dict")
    return cast("dict[str, Any]", state)


def _attach(model: nn.Module, optimizer: Optimizer, name: str, module: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    module.to(torch.float64 if dtype == torch.float64 else torch.float32)
    for part in module.modules():
        part.__dict__["stays_float32"] = True  # also in a model of 16 bits: it is no part of its forward
    unwrapped(model).add_module(name, module)
    parameters = list(module.parameters())
    if parameters:
        decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.defaults else {}
        optimizer.add_param_group({"params": parameters, **decay})


def _title(name: str) -> str:
    return f"task `{name}`" if name else "the task"


# --- modules of tasks


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
