"""The tasks of a run: their names, coefficients and states.

Learned coefficients become a part of the model, `task_coefficients` or `task_balance`: saved, averaged, clipped.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import said
from evenstep.errors import ArgumentError, CheckpointError, TaskError
from evenstep.internals import unwrapped
from evenstep.options import RESERVED, NormStatistics, check_names
from evenstep.parallel.buffers import is_norm
from evenstep.tensors import LEARNED
from evenstep.train.tasks.task import Task
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
