"""Puts the tasks of a run together: their names, their coefficients, and what is learned about them.

What is learned becomes a part of the model, `task_coefficients` or `task_balance`, so that checkpoints, averages,
clipping and ranks treat it as they treat all parameters and buffers. It runs nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from types import FunctionType
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import advice, require_flag, said
from evenstep.data import Data
from evenstep.errors import ArgumentError, CheckpointError, TaskError
from evenstep.options import check_task_names
from evenstep.parallel import Strategy
from evenstep.pipeline import PipelineModel
from evenstep.train.failures import FailurePolicy
from evenstep.train.state.train_state import unwrapped
from evenstep.train.tasks.coefficients import LEARNED, Coefficients, Fixed
from evenstep.train.tasks.combine import Combine, Separate
from evenstep.train.tasks.norms import Kind, Norms, build_norms
from evenstep.train.tasks.task import Task

_ALMOST = 0.9  # how alike two names are that differ by an "s"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The tasks of a run, and what is said about them together.

    Args:
        by_name: "" is that of a run with one task without a name.
        combine: the method for separate gradients, or None.
        norm_statistics: whose running statistics normalisation layers keep.
        distinguished: whether something is asked for that only named tasks have.
    """

    by_name: dict[str, Task]
    coefficients: Coefficients
    combine: Combine | None
    norm_statistics: Kind
    distinguished: bool

    @classmethod
    def of(
        cls,
        task: Task | Mapping[str, Task],
        coefficients: Coefficients | Mapping[str, float] | None,
        combine: Combine | None,
        norm_statistics: Kind,
    ) -> Self:
        """The tasks from a trainer's arguments.

        Raises:
            ArgumentError: no task, or a name that metrics and files cannot have.
        """
        tasks = named(task)
        return cls(
            by_name=tasks,
            coefficients=coefficients_of(coefficients),
            combine=combine_of(combine, tasks),
            norm_statistics=norm_statistics,
            distinguished=bool(coefficients) or norm_statistics == "per-task",
        )

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Norms:
        """Make what is learned about the tasks a part of the model; gives its normalisation layers."""
        names = tuple(self.by_name)
        built = (self.coefficients.build(names), None if self.combine is None else self.combine.build(names))
        for name, module in zip(LEARNED, built, strict=True):
            _attach(model, optimizer, name, module)
        return build_norms(model, names, self.norm_statistics)


def named(task: Task | Mapping[str, Task]) -> dict[str, Task]:
    """The tasks by name; one without a name has "".

    Raises:
        ArgumentError: no task, or a name that metrics and files cannot have.
    """
    if isinstance(task, Task):
        return {"": task}
    given: Any = task
    if not isinstance(given, Mapping) or not given:
        what = "empty" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ArgumentError(
            f"`task` must be a Task, or tasks by name, but is {what}; give an instance of a subclass of "
            f"`evenstep.Task`."
        )
    check_task_names(map(str, task))
    return dict(task)


def coefficients_of(given: Coefficients | Mapping[str, float] | None) -> Coefficients:
    """Numbers are fixed coefficients."""
    return given if isinstance(given, Coefficients) else Fixed(given)


def combine_of(given: Combine | None, tasks: Mapping[str, Task]) -> Combine | None:
    """The method asked for; a weight that comes late is divided by before the next task's gradient is added."""
    late = len(tasks) > 1 and any(task.late_weight for task in tasks.values())
    return Separate() if given is None and late else given


def check_tasks(
    tasks: Tasks,
    data: Data | None,
    evaluations: Mapping[str, Data],
    *,
    model: nn.Module,
    policy: FailurePolicy,
) -> None:
    """Raise ArgumentError for what cannot be done with these tasks.

    Args:
        data: for training; None where a loop of one's own brings them.
        evaluations: for evaluation, by name.
        model: whose gradients they are.
        policy: for what goes wrong.
    """
    by_name, combine = tasks.by_name, tasks.combine
    if data is not None:
        _check_names("`data`", data.tasks, by_name)
    for name, one in evaluations.items():
        _check_names(f"the evaluation '{name}'", one.tasks, by_name)
    for name, task in by_name.items():
        _check_methods(type(task))
        _check_members(task)
        if task.reduction not in ("weight", "sum", "mean"):
            raise ArgumentError(
                f'`reduction` of `{type(task).__name__}` must be "weight", "sum" or "mean", but is {task.reduction!r}.'
            )
        if task.late_weight and task.reduction != "weight":
            raise ArgumentError(
                f"task `{name}` has `late_weight`, so its loss is divided by that weight, but its `reduction` is "
                f'"{task.reduction}"; leave one of them out.'
            )
    if "" in by_name and (tasks.distinguished or combine is not None or policy.tolerates_errors):
        raise ArgumentError(
            "coefficients, `combine`, statistics per task and DropTask are for several tasks, but this run has one "
            "without a name; give tasks by name, `task={'class': …, 'box': …}`."
        )
    if isinstance(model, PipelineModel):
        _check_stages(tasks, policy)
    if combine is not None and combine.needs_products:
        _check_separable(model)


def _check_methods(kind: type[Task]) -> None:
    """Raise ArgumentError for a method that is named almost as one of `Task` that the class leaves as it is."""
    known = [name for name, value in vars(Task).items() if not name.startswith("_") and callable(value)]
    for base in kind.__mro__[: kind.__mro__.index(Task)]:
        for name, value in vars(base).items():
            if name.startswith("_") or hasattr(Task, name) or not callable(value):
                continue
            close = get_close_matches(name, known, n=1, cutoff=_ALMOST)
            if close and getattr(kind, close[0]) is getattr(Task, close[0]):
                raise ArgumentError(
                    f"`{kind.__name__}` has a method `{name}`, which nothing calls; did you mean `{close[0]}`? If it "
                    f"is a method of your own, call it `_{name}`."
                )


def _check_members(task: Task) -> None:
    """Raise ArgumentError for a member of a task that could not be called, or used, as it will be."""
    kind = type(task).__name__
    for name, one in vars(Task).items():
        if name.startswith("_") or not isinstance(one, FunctionType):
            continue
        own: Any = getattr(task, name)
        names = [*signature(one).parameters][1:]
        written = f"def {name}({', '.join(['self', *names])})"
        if not callable(own):
            raise ArgumentError(f"`{kind}.{name}` must be a method, but is {said(own)}; write `{written}`.")
        try:
            signature(own).bind(*names)
        except TypeError:
            raise ArgumentError(
                f"`{kind}.{name}` is called with {' and '.join(names) or 'nothing'}, but takes "
                f"`{signature(own)}`; write `{written}`."
            ) from None
        except ValueError:  # compiled: it does not tell
            continue
    require_flag(f"{kind}.late_weight", task.late_weight)
    if not isinstance(cast("object", task.metrics), Mapping):
        raise ArgumentError(
            f"`{kind}.metrics` must be objects of torchmetrics by name, but is {said(task.metrics)}; write `metrics = "
            f"{{'f1': F1Score(…)}}` in the class, and numbers of a batch as `Loss(…, metrics={{name: (sum, weight)}})`."
        )


def state_of(task: Task, name: str) -> dict[str, Any]:
    """What a task keeps in checkpoints.

    Raises:
        TaskError: that is no dict.
    """
    state: Any = task.state_dict()
    if not isinstance(state, dict):
        raise TaskError(
            f"`state_dict` of {_named(name)} must give a dict, but gave {said(state)}; return `{{'name': value}}`, or "
            f"`{{}}` where there is nothing to keep."
        )
    return cast("dict[str, Any]", state)


def _check_stages(tasks: Tasks, policy: FailurePolicy) -> None:
    asked = {
        "learned coefficients": tasks.coefficients.are_learned,
        "`combine`": tasks.combine,
        "DropTask": policy.tolerates_errors,
    }
    for what, wanted in asked.items():
        if wanted:
            raise ArgumentError(
                f"a model in stages trains several tasks accumulated, with coefficients that are numbers or follow a "
                f"schedule; {what} would need the whole model on each rank. Leave it out, or train without stages."
            )


def _check_names(what: str, names: Sequence[str] | None, tasks: Mapping[str, Task]) -> None:
    for name in names or ():
        if name in tasks:
            continue
        if name == "":
            raise ArgumentError(
                f"{what} does not say which task a batch is for, but the run has tasks {', '.join(tasks)}; give it as "
                f"`Mixture({{task: data}})`."
            )
        if "" in tasks:
            raise ArgumentError(f"{what} has batches of task `{name}`, but the run's task has no name; give it one.")
        raise ArgumentError(f"{what} has batches of task `{name}`, which the run has not; {advice(name, tasks)}")


def _check_separable(model: nn.Module) -> None:
    sparse = [
        f"`{name}`" if name else "the model itself"
        for name, part in model.named_modules()
        if getattr(part, "sparse", False) is True
    ]
    if sparse:
        raise ArgumentError(f"`combine` needs dense gradients, but those of {sparse[0]} are sparse.")


def _attach(model: nn.Module, optimizer: Optimizer, name: str, module: nn.Module | None) -> None:
    """Make what is learned about tasks a part of the model, and its parameters a group of the optimizer's."""
    if module is None:
        return
    dtype = next(model.parameters()).dtype
    module.to(torch.float64 if dtype == torch.float64 else torch.float32)
    for part in module.modules():
        part.__dict__["stays_float32"] = True  # also in a model of 16 bits: it is no part of what that computes
    unwrapped(model).add_module(name, module)
    parameters = list(module.parameters())
    if parameters:
        decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.defaults else {}
        optimizer.add_param_group({"params": parameters, **decay})


def poison_of(optimizer: Optimizer, policy: FailurePolicy, strategy: Strategy) -> Callable[[], Tensor] | None:
    """Gives losses whose gradient is NaN, in a parameter that every rank has; None where what a task raises must end
    the run: shards are gathered in the midst of a forward, where the peers of a rank that stops there wait for it.
    """
    if not policy.tolerates_errors or strategy.layout.divides == "elements":
        return None
    parameters = (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
    first: Tensor = next(parameters)
    return lambda: first.flatten()[:1].float().sum() * math.nan


def check_task_states(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Raise CheckpointError unless the tasks that have a state are those whose state was saved."""
    missing = [name for name, task in tasks.items() if name not in saved and state_of(task, name)]
    surplus = [name for name in saved if name not in tasks]
    faults = [f"has no state of {_named(name)}, which has some" for name in missing]
    faults += [f"has a state of {_named(name)}, which this run has not" for name in surplus]
    if faults:
        raise CheckpointError(
            f"the checkpoint {' and '.join(faults)}, so going on from it would not be exact; resume with the tasks "
            f"that it was saved with."
        )


def _named(name: str) -> str:
    return f"task `{name}`" if name else "the task"
