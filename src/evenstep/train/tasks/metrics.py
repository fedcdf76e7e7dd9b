"""Names and inputs of metrics: of a task's metric objects, derived metrics, pairs and counts.

How the states of metric objects are kept and reduced over ranks is in `events.metrics.meters`.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.arguments import advice, said
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Storage
from evenstep.events.metrics.derived import DerivedMetrics, Throughput
from evenstep.events.metrics.meters import Meters
from evenstep.internals import pytree
from evenstep.lazy import load_optional
from evenstep.train.tasks.task import Loss, Task, evaluates_itself

_OF_UPDATES = ("lr", "grad_norm", "clipped", "loss_scale")
_TAKEN = ("loss", "no_loss", *_OF_UPDATES)  # the engine's own
_SPACES = tuple(f"{name}/" for name in (*_OF_UPDATES, "param_norm", "update_ratio", "parameters"))
_FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build_storage(tasks: Mapping[str, Task], device: torch.device, clip_norm: float | None = None) -> Storage:
    """The storage for metrics of a run, or of an evaluation beside one.

    Args:
        clip_norm: of the run, for the metric that says which updates were clipped.

    Raises:
        MissingExtraError: torchmetrics is not installed.
        ArgumentError: something that is no metric, or has a name that is taken.
    """
    for task in tasks.values():
        for name, function in task.derived.items():
            if not callable(function) or _is_taken(name) or name in task.metrics:
                raise ArgumentError(
                    f"the derived metric `{name}` of {type(task).__name__} must be a function of the other metrics, "
                    f"and have a name that no other metric has.",
                    field="derived",
                )
    own = frozenset(name for name, task in tasks.items() if evaluates_itself(task))
    derived = DerivedMetrics({name: task.derived for name, task in tasks.items()}, evaluating=own)
    meters, throughput = build_meters(tasks, device), _throughput(tasks)
    return Storage(meters=meters, derived=derived, throughput=throughput, clip_norm=clip_norm)


def _throughput(tasks: Mapping[str, Task]) -> Throughput:
    for task in tasks.values():
        if not isinstance(cast("object", task.unit), str) or not re.fullmatch(r"[A-Za-z0-9_-]*", task.unit):
            raise ArgumentError(
                f"`unit` of {type(task).__name__} must be what its weight counts, one word of letters, digits, `_` and "
                f"`-` such as 'tokens', but is {task.unit!r}.",
                field="unit",
            )
    units = {task.unit for task in tasks.values()}
    own = any(task.unit or task.late_weight or type(task).weight is not Task.weight for task in tasks.values())
    losses = [f"train/{name}/loss" if name else "train/loss" for name in tasks] if own else []
    return Throughput(losses, (units.pop() if len(units) == 1 else "") or "weight")


def _is_taken(name: str) -> bool:
    return name in _TAKEN or name.startswith(_SPACES) or not name.isprintable()


def build_meters(tasks: Mapping[str, Task], device: torch.device) -> Meters:
    """The meters of a run's tasks, on the device; "class/f1" is metric `f1` of task `class`.

    Raises:
        MissingExtraError: torchmetrics is not installed.
        ArgumentError: something that is no metric, or has a name that is taken.
    """
    metrics: dict[str, Any] = {}
    for task_name, task in tasks.items():
        for name, metric in task.metrics.items():
            _check(task, name, metric)
            metrics[f"{task_name}/{name}" if task_name else name] = metric.clone().to(device)
    return Meters(metrics)


def _check(task: Task, name: str, metric: Any) -> None:
    torchmetrics = load_optional("torchmetrics", "torchmetrics")
    where = f"the metric `{name}` of {type(task).__name__}"
    if isinstance(metric, torchmetrics.MetricCollection):
        raise ArgumentError(f"{where} is a collection; give its metrics by name, `metrics = {{**collection}}`.")
    if not isinstance(metric, torchmetrics.Metric):
        raise ArgumentError(f"{where} must be a `torchmetrics.Metric`, but is a {type(metric).__name__}.")
    if _is_taken(name):
        raise ArgumentError(f"{where} must have a printable name that is none of {', '.join(_TAKEN)}; rename it.")


def check_names(task: Task, loss: Loss) -> None:
    """Raise TaskError for a metric or count that would be mixed with another of the same name."""
    for name in loss.metrics:
        if name in task.derived or name in _TAKEN or name.startswith(_SPACES):
            raise TaskError(
                f"{type(task).__name__} gives a metric called `{name}`, which is the name of another; rename it.",
                field=name,
            )
    for name in loss.counts:
        if name in loss.metrics or name in task.derived or _is_taken(name):
            raise TaskError(
                f"{type(task).__name__} gives a count called `{name}`, which is the name of a metric; rename it.",
                field=name,
            )


def no_pair(task: Task, name: str, given: object) -> TaskError:
    """The error for a metric that is a single number, which can't be averaged over batches of different sizes."""
    return TaskError(
        f"the metric `{name}` of {type(task).__name__} must be a pair (sum, weight), which is averaged over batches as "
        f"Σsum/Σweight, but is {said(given)}; write `{{'{name}': (correct, total)}}`, or `(mean * count, count)`.",
        field=name,
    )


def observations(task: Task, loss: Loss, microbatch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of `update` of each metric of the task, by name, for a micro-batch.

    Raises:
        TaskError: the task did not say, or left out what a metric needs.
    """
    observed = loss.observed
    if observed is None and loss.sum is None:
        return
    if observed is None:
        raise TaskError(
            f"{type(task).__name__} has metrics ({', '.join(task.metrics)}), but its `loss` did not say what they see "
            f"of micro-batch {microbatch}; return `Loss(…, observed={{…}})` with the arguments of their `update`, or "
            f"`observed={{}}` where there is nothing to see.",
            field="observed",
        )
    if not observed:
        return
    own = {name: value for name, value in observed.items() if name in task.metrics and isinstance(value, Mapping)}
    shared = {name: value for name, value in observed.items() if name not in own}
    for name, metric in task.metrics.items():
        given: Mapping[str, Any] = own.get(name, shared)
        if not given:  # what there is is for others
            continue
        taken: dict[str, Any] = metric._filter_kwargs(**given)
        _check_complete(task, name, metric, taken, given)
        yield name, cast("dict[str, Any]", pytree.tree_map_only(Tensor, Tensor.detach, taken))


def _check_complete(task: Task, name: str, metric: Any, taken: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(metric.update).parameters.values()
    needed = [one.name for one in parameters if one.kind not in _FREE and one.default is inspect.Parameter.empty]
    for missing in needed:
        if missing not in taken:
            raise TaskError(
                f"the metric `{name}` ({type(metric).__name__}) of {type(task).__name__} needs `{missing}`, which is "
                f"not in `observed`; {advice(missing, given)} A metric's own arguments can be given under its name."
            )
