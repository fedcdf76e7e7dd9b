"""Puts the tasks of a run together: their names, their coefficients, and what is learned about them.

What is learned becomes a part of the model, `task_coefficients` or `task_balance`, so that checkpoints, averages,
clipping and ranks treat it as they treat all parameters and buffers. It runs nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import said
from evenstep.errors import ArgumentError, CheckpointError, TaskError
from evenstep.events.restore import restore_state
from evenstep.internals import pytree, times_written, unwrapped
from evenstep.names import LEARNED, parameters_in
from evenstep.options import NormStatistics, check_task_names
from evenstep.parallel import Strategy
from evenstep.parallel.replicas import bits
from evenstep.train.failures import FailurePolicy
from evenstep.train.side_effects import Attributes, tensors_of
from evenstep.train.tasks.coefficients import Coefficients, Fixed
from evenstep.train.tasks.combine import Combine, Separate
from evenstep.train.tasks.norm_statistics import Norms, build_norms
from evenstep.train.tasks.task import Task


class Tasks(NamedTuple):
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
    norm_statistics: NormStatistics
    distinguished: bool

    @classmethod
    def of(
        cls,
        task: Task | Mapping[str, Task],
        coefficients: Coefficients | Mapping[str, float] | None,
        combine: Combine | None,
        norm_statistics: NormStatistics,
    ) -> Self:
        """The tasks from a trainer's arguments.

        Raises:
            ArgumentError: no task, or a name that metrics and files cannot have.
        """
        tasks = named(task)
        # a weight that comes late is divided by before the next task's gradient is added
        late = len(tasks) > 1 and any(one.late_weight for one in tasks.values())
        return cls(
            by_name=tasks,
            coefficients=coefficients if isinstance(coefficients, Coefficients) else Fixed(coefficients),
            combine=Separate() if combine is None and late else combine,
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


def values_by_place(tasks: Mapping[str, Task]) -> dict[str, int | str]:
    """The numbers, texts and tensors that tasks keep in checkpoints, by task and place: equal values where they are.

    >>> class Counts(Task):
    ...     loss = lambda self, output, batch: output
    ...     state_dict = lambda self: vars(self)
    >>> one, other = Counts(), Counts(); one.seen, other.center = {"a": 1}, torch.zeros(2)
    >>> values_by_place({"": one}), values_by_place({"first": one, "second": other})
    ({"Counts['seen']['a']": '1'}, {"first['seen']['a']": '1', "second['center']": 0})
    """
    values: dict[str, int | str] = {}
    for name, state in states_of(tasks).items():
        for place, value in pytree.tree_flatten_with_path(state)[0]:
            called = (name or type(tasks[name]).__name__) + pytree.keystr(place)
            if isinstance(value, Tensor):
                values[called] = int(bits(value))
            elif isinstance(value, bool | int | float | str):  # of what else, nothing is known but where it is
                values[called] = repr(value)  # of which NaN is equal to itself
    return values


class _TaskStates(NamedTuple):
    """What tasks remember as an update begins; of tensors how often they were written to, and perhaps a copy."""

    update: int
    attributes: list[Attributes]
    tensors: dict[str, tuple[Tensor, int, Tensor | None]]


@final
class StatesOfTasks:
    """What tasks remember, as it was when an update began: put back where that is aborted, or done again.

    Those remember something that have a `state_dict` of their own. Tensors that they write to in place are copied at
    the beginning of each update, until one has passed in which they were not.

    >>> Counts = type("Counts", (Task,), {"loss": lambda self, output, batch: output, "state_dict": vars})
    >>> task = Counts(); task.seen, task.sums = 1, torch.zeros(1); states = StatesOfTasks([task]); states.begin(1)
    >>> task.seen += 1; _ = task.sums.add_(1); states.put_back(); task.seen, task.sums
    (1, tensor([0.]))
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = [one for one in tasks if type(one).state_dict is not Task.state_dict]
        self._begun: list[_TaskStates] = []  # as updates began whose verdict the host does not know, and the last one
        self._tensors: dict[str, tuple[Tensor, int, Tensor | None]] = {}  # of the last one
        self._still = set[str]()

    def begin(self, update: int) -> None:
        """An update begins."""
        if not self._tasks:
            return
        for name, (tensor, times, _) in self._tensors.items():
            (self._still.add if times_written(tensor) == times else self._still.discard)(name)
        self._tensors = {
            name: (one, times_written(one), None if name in self._still else one.clone())
            for number, task in enumerate(self._tasks)
            for name, one in ((f"{number}.{place}", one) for place, one in tensors_of(task))
        }
        self._begun.append(_TaskStates(update, [Attributes(task) for task in self._tasks], self._tensors))

    def put_back(self) -> None:
        """Let all be as it was when the last update began.

        Raises:
            TaskError: something was written to that was not in the update before, so that no copy was made.
        """
        if self._begun:
            self._put_back(len(self._begun) - 1)

    def keep(self) -> None:
        """What the last update did stays, or was put back."""
        if self._begun:
            self._begun.pop()

    def settle(self, aborted: int | None) -> None:
        """What updates did stays whose verdict was not known; what those from number `aborted` on did is put back.

        Raises:
            TaskError: as of `put_back`.
        """
        if not self._begun:
            return
        places = [place for place, one in enumerate(self._begun) if one.update == aborted]
        if places:
            self._put_back(places[0])
        self._begun.clear()

    def _put_back(self, place: int) -> None:
        for name, (tensor, times, _) in self._begun[place].tensors.items():
            if times_written(tensor) == times:
                continue
            later = [one.tensors[name] for one in self._begun[place:] if name in one.tensors]  # still as it was
            copies = [copy for other, then, copy in later if other is tensor and then == times and copy is not None]
            if not copies:
                number, _, attribute = name.partition(".")
                raise TaskError(
                    f"{type(self._tasks[int(number)]).__name__} has written to its `{attribute}` in place, which it "
                    f"had not done before, in an update that is aborted or must be done again, so what it was is not "
                    f"known; put a new tensor there instead, `self.NAME = …`."
                )
            tensor.copy_(copies[0])
        for kept in self._begun[place].attributes:
            kept.put_back()


def states_of(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """The states of the tasks that may have one, by name."""
    states = {name: state_of(task, name) for name, task in tasks.items()}
    may_have = {name for name, task in tasks.items() if type(task).state_dict is not Task.state_dict}
    return {name: state for name, state in states.items() if state or name in may_have}


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
    parameters = (one for one in parameters_in(optimizer) if one.requires_grad)
    first: Tensor = next(parameters)
    return lambda: first.flatten()[:1].float().sum() * math.nan


def check_task_states(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Raise CheckpointError unless the tasks that have a state are those whose state was saved."""
    missing = [name for name, task in tasks.items() if name not in saved and state_of(task, name)]
    surplus = [name for name, state in saved.items() if state and name not in tasks]
    faults = [f"has no state of {_named(name)}, which has some" for name in missing]
    faults += [f"has a state of {_named(name)}, which this run has not" for name in surplus]
    if faults:
        raise CheckpointError(
            f"the checkpoint {' and '.join(faults)}, so going on from it would not be exact; resume with the tasks "
            f"that it was saved with."
        )


def load_task_state(task: Task, name: str, state: dict[str, Any], *, goes_back: bool = False) -> None:
    """Give a task the state that it had in a checkpoint.

    Args:
        goes_back: whether it may remember updates, which are undone.

    Raises:
        TaskError: it had none then, and does not begin afresh.
    """
    restore_state(task, _named(name), state, TaskError, goes_back=goes_back)


def _named(name: str) -> str:
    return f"task `{name}`" if name else "the task"
