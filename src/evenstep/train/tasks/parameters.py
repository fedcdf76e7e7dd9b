"""Parameters of tasks: a loss with weights of its own is trained with the model, as a part of it.

They become `task_parameters` of the model, below that by the names that the task has for them (of several tasks, behind
the task's name), and are from then on reduced, clipped, averaged, stepped and saved as all others are. What a task
merely uses (a frozen network, metrics, parts of the model) stays its own affair.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

from torch import nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import children_of, parameters_of, share_contents, unwrapped
from evenstep.pipeline import PipelineModel
from evenstep.tensors import TASK_PARAMETERS, parameters_in
from evenstep.train.tasks.task import IN_MODEL, Task


class TaskParameters(nn.Identity):
    """Holds modules and parameters of tasks; a model that runs all of its parts, as `nn.Sequential`, runs this too."""


@final
class _ModuleOfTask(TaskParameters):
    """Holds all that a task holds that is a module itself, and is in training mode when that is.

    The task could not stand in the model by itself: it would be asked for its state as other modules are.
    """

    def __init__(self, task: nn.Module) -> None:
        vars(self)["_task"] = task  # as no child, and before the base class asks for it
        super().__init__()
        share_contents(self, task)

    @property
    def training(self) -> bool:
        return vars(self)["_task"].training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["_task"].training = mode


@contextmanager
def parameters_attached(model: nn.Module, tasks: Mapping[str, Task], optimizer: Optimizer) -> Generator[None]:
    """Let what the tasks train be a part of the model; where something raises inside, it is as it was.

    Raises:
        ArgumentError: what can't be trained, or what the optimizer holds in part.
    """
    attach_parameters(model, tasks, {id(one) for one in parameters_in(optimizer)})
    try:
        yield
    except BaseException:
        _detach(unwrapped(model))
        raise


def attach_parameters(model: nn.Module, tasks: Mapping[str, Task], held: Collection[int] | None = None) -> None:
    """Make what the tasks train a part of the model.

    Args:
        held: by `id`, what the optimizer holds. None: it is built of the model's parameters later, so that all are
            taken that are not frozen.

    Raises:
        ArgumentError: a model in stages, or a module of the task and the model both.
    """
    whole = unwrapped(model)
    _detach(whole)
    own = {id(one) for one in whole.parameters()}
    found = {name: _collected(task, own, held) for name, task in tasks.items()}
    by_name = {name: one for name, one in found.items() if any(True for _ in one.parameters())}
    if not by_name:
        return
    everything = by_name.get("")
    if everything is None:  # tasks with names
        everything = TaskParameters()
        children_of(everything).update(by_name)
    if isinstance(whole, PipelineModel):
        first = next(name for name, _ in everything.named_parameters())
        raise ArgumentError(
            f"a task has a trained parameter of its own (`{first}`), which a model in stages can't take in, since only "
            f"the ranks of the last stage compute losses; make it a part of that stage's layers, freeze it "
            f"(`requires_grad_(False)`), or train without stages."
        )
    for part in everything.modules():
        part.__dict__["stays_float32"] = True  # also in a model of 16 bits: it is no part of what that computes
    for parameter in everything.parameters():
        cast("Any", parameter).stays_whole = True  # also on shards: a loss uses it where no forward gathers it
    whole.add_module(TASK_PARAMETERS, everything)


def _collected(task: Task, own: Collection[int], held: Collection[int] | None) -> TaskParameters:
    attributes = vars(task)
    attributes.pop(IN_MODEL, None)
    if isinstance(task, nn.Module):
        if not _is_trained(task, type(task).__name__, own, held):
            return TaskParameters()
        attributes[IN_MODEL] = True
        return _ModuleOfTask(task)
    found = TaskParameters()
    for name, one in attributes.items():
        if isinstance(one, nn.Module) and _is_trained(one, f"{type(task).__name__}.{name}", own, held):
            children_of(found)[name] = one
        elif isinstance(one, nn.Parameter) and _is_trained(one, f"{type(task).__name__}.{name}", own, held):
            parameters_of(found)[name] = one
    return found


def _is_trained(one: nn.Module | nn.Parameter, name: str, own: Collection[int], held: Collection[int] | None) -> bool:
    by_name = dict(one.named_parameters()) if isinstance(one, nn.Module) else {"": one}
    theirs = {inner: parameter for inner, parameter in by_name.items() if id(parameter) not in own}
    left = [inner for inner, parameter in theirs.items() if held is not None and id(parameter) not in held]
    if len(left) == len(theirs) and isinstance(one, nn.Module):
        return False  # of another engine, or of none: what no optimizer here holds is not trained here
    trained = [inner for inner, parameter in theirs.items() if parameter.requires_grad]
    missing = [inner for inner in left if inner in trained]
    if missing:
        what = f"its `{missing[0]}`" if missing[0] else "it"
        raise ArgumentError(
            f"the task trains `{name}`, but the optimizer does not hold {what}; "
            f"build that of all, `AdamW([*model.parameters(), *task.NAME.parameters()])`, or freeze it: "
            f"`requires_grad_(False)`.",
            field=name,
        )
    if len(left) == len(theirs) or (held is None and not trained):
        return False
    if len(theirs) < len(by_name):
        raise ArgumentError(
            f"`{name}` holds parameters of the model beside {len(theirs)} of its own that are to be trained, which "
            f"can't be told apart; keep its own in a module by itself."
        )
    return True


def _detach(model: nn.Module) -> None:
    if isinstance(getattr(model, TASK_PARAMETERS, None), TaskParameters):
        delattr(model, TASK_PARAMETERS)
