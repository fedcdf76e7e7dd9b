"""Checks that tasks have the members that will be called, and fit each other, the data, and the model."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from types import FunctionType
from typing import Any, cast

from torch import nn

from evenstep.arguments import advice, require_flag, said
from evenstep.data import Data, Mixture
from evenstep.errors import ArgumentError
from evenstep.optim.ema import Ema
from evenstep.parallel import Strategy
from evenstep.pipeline import PipelineModel
from evenstep.train.failures import FailurePolicy
from evenstep.train.tasks.listening import MOMENTS, heard
from evenstep.train.tasks.task import Task, evaluates_itself
from evenstep.train.tasks.tasks import Tasks

_ALMOST = 0.9  # how alike two names are that differ by an "s"


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
    """
    by_name, combine = tasks.by_name, tasks.combine
    if data is not None:
        _check_names("`data`", data.tasks, by_name)
    for name, one in evaluations.items():
        _check_names(f"the evaluation '{name}'", one.tasks, by_name)
        if data is not None:
            check_stream_apart(f"the evaluation '{name}'", one, data)
        check_taken_once(f"the evaluation '{name}'", one, "its metrics would not be those of the set")
    for name, task in by_name.items():
        _check_methods(type(task))
        _check_members(task)
        for moment in heard(task):
            _check_called(task, moment, ["event"], "the event")
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


def check_stream_apart(what: str, data: Data, trained: Data) -> None:
    """Raise ArgumentError for data that would move the stream on which is trained.

    Args:
        what: the data are, for the message.
        trained: the data of the training.
    """
    stream = data.unshared_stream
    if stream is not None and stream is trained.unshared_stream:
        raise ArgumentError(
            f"{what} reads the stream that `data` reads, a {type(stream).__name__}, and each would go on where the "
            f"other has stopped; give it a stream of its own."
        )


def check_taken_once(what: str, data: Data, otherwise: str) -> None:
    """Raise ArgumentError for a mixture whose epoch repeats samples or leaves some out.

    Args:
        what: the data are, for the message.
        otherwise: what would come of it.
    """
    if isinstance(data, Mixture) and (task := data.not_taken_once(seed=0)):
        raise ArgumentError(
            f"{what} is a mixture whose epoch does not take each sample of task `{task}` once, so {otherwise}; write "
            f'`Mixture(…, end="max")`, without `windows`.'
        )


def check_whole_model(tasks: Mapping[str, Task], ema: Ema | None, model: nn.Module, strategy: Strategy) -> None:
    """Raise ArgumentError for a task that calls the whole model where no rank holds it."""
    for name, task in tasks.items():
        if task.uses_average and ema is None:
            raise ArgumentError(
                f"task `{name}` has `uses_average`, but the run has no average; give it `train=Training(ema=Ema(…))`, "
                f"in a run file a table `[ema]`.",
                field="ema",
            )
        needs = "uses_average" if task.uses_average else "evaluate" if evaluates_itself(task) else ""
        if needs and (isinstance(model, PipelineModel) or strategy.layout.divides == "elements"):
            raise ArgumentError(
                f"task `{name}` calls the whole model (`{needs}`), which no rank holds in stages or shards; train with "
                f"`ddp` or `zero1`, or evaluate its checkpoints on one process.",
                field=needs,
            )


def _check_methods(kind: type[Task]) -> None:
    """Raise ArgumentError for a method that is named almost as one of `Task` that the class leaves as it is."""
    known = [name for name, value in vars(Task).items() if not name.startswith("_") and callable(value)]
    known += MOMENTS
    for base in kind.__mro__[: kind.__mro__.index(Task)]:
        for name, value in vars(base).items():
            if name.startswith("_") or hasattr(Task, name) or name in MOMENTS or not callable(value):
                continue
            close = get_close_matches(name, known, n=1, cutoff=_ALMOST)
            if close and getattr(kind, close[0], None) is getattr(Task, close[0], None):
                raise ArgumentError(
                    f"`{kind.__name__}` has a method `{name}`, which nothing calls; did you mean `{close[0]}`? If it "
                    f"is a method of your own, call it `_{name}`."
                )


def _check_called(task: Task, name: str, names: Sequence[str], given: str) -> list[str]:
    """The names of what a method takes; none where it is compiled, and does not tell.

    Args:
        names: of what it is called with, and `given` is that in words.

    Raises:
        ArgumentError: it is no method, or can't be called so.
    """
    own: Any = getattr(task, name)
    called, written = f"`{type(task).__name__}.{name}`", _written(name, names)
    if not callable(own):
        raise ArgumentError(f"{called} must be a method, but is {said(own)}; write `{written}`.")
    try:
        takes = signature(own)
    except ValueError:
        return []
    try:
        takes.bind(*names)
    except TypeError:
        raise ArgumentError(f"{called} is called with {given}, but takes `{takes}`; write `{written}`.") from None
    return [*takes.parameters]


def _written(name: str, names: Sequence[str]) -> str:
    return f"def {name}({', '.join(['self', *names])})"


def _check_members(task: Task) -> None:
    """Raise ArgumentError for a member of a task that could not be called, or used, as it will be."""
    kind = type(task).__name__
    for name, one in vars(Task).items():
        if name.startswith("_") or not isinstance(one, FunctionType):
            continue
        names = [*signature(one).parameters][1:]
        taken = _check_called(task, name, names, " and ".join(names) or "nothing")[: len(names)]
        if any(one in ("model", *names) and one != name for one, name in zip(taken, names, strict=False)):
            raise ArgumentError(
                f"`{kind}.{name}` is called with {' and '.join(names)}, but its arguments are called "
                f"{' and '.join(taken)}, as if others were given; write `{_written(name, names)}`."
            )
    require_flag(f"{kind}.late_weight", task.late_weight)
    require_flag(f"{kind}.uses_average", task.uses_average)
    if not isinstance(cast("object", task.derived), Mapping):
        raise ArgumentError(
            f"`{kind}.derived` must be functions of metrics by name, but is {said(task.derived)}; write `derived = "
            f"{{'ppl': lambda metrics: math.exp(metrics['loss'])}}` in the class."
        )
    if not isinstance(cast("object", task.metrics), Mapping):
        raise ArgumentError(
            f"`{kind}.metrics` must be objects of torchmetrics by name, but is {said(task.metrics)}; write `metrics = "
            f"{{'f1': F1Score(…)}}` in the class, and numbers of a batch as `Loss(…, metrics={{name: (sum, weight)}})`."
        )


def _check_stages(tasks: Tasks, policy: FailurePolicy) -> None:
    late = next((name for name, task in tasks.by_name.items() if task.late_weight), None)
    if late is not None and len(tasks.by_name) > 1:
        raise ArgumentError(
            f"a model in stages trains several tasks accumulated, but task `{late}` has `late_weight`, so its gradient "
            f"must be divided by its weight before it is added to theirs. Let `weight` count it from the batch, or "
            f"train without stages."
        )
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
