"""Names and inputs of metrics: of a task's metric objects, derived metrics, pairs and counts."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Storage
from evenstep.events.metrics.derived import DerivedMetrics, Throughput
from evenstep.events.metrics.meters import Meters
from evenstep.internals import pytree
from evenstep.lazy import load_optional
from evenstep.train.tasks.task import Loss, Task, evaluates_itself

_OF_UPDATES = ("lr", "grad_norm", "clipped", "loss_scale")
_TAKEN = ("loss", "no_loss", *_OF_UPDATES)  # the engine's own
_SPACES = tuple(f"{name}/" for name in (*_OF_UPDATES, "param_norm", "update_ratio"))


def build_storage(tasks: Mapping[str, Task], device: torch.device, clip_norm: float | None = None) -> Storage:
    """The storage for metrics of a run, or of an evaluation beside one; `clip_norm` is the run's."""
    meters: dict[str, Any] = {}
    for task_name, task in tasks.items():
        metrics = metrics_of(task)
        for name, metric in metrics.items():
            _check_metric(task, name, metric)
            meters[f"{task_name}/{name}" if task_name else name] = metric.clone().to(device)
        for name in task.derived:
            if _is_taken(name) or name in metrics:
                raise ArgumentError(
                    f"the derived metric `{name}` of {type(task).__name__} must have its own name.", field="derived"
                )
    own = frozenset(name for name, task in tasks.items() if evaluates_itself(task))
    derived = DerivedMetrics({name: task.derived for name, task in tasks.items()}, evaluating=own)
    return Storage(meters=Meters(meters), derived=derived, throughput=_throughput(tasks), clip_norm=clip_norm)


class LaterMetrics(dict[str, Any]):
    """Metrics that a task names while it computes, as a LightningModule does."""

    def add(self, name: str, metric: Any) -> None:
        """Keep an empty copy under a name."""
        if name not in self:
            self[name] = metric.clone()


def metrics_of(task: Task) -> dict[str, Any]:
    """The metric objects of a task by name, in a `MetricCollection` by its name and theirs."""
    if _is_collection(task.metrics):
        return dict(task.metrics.items())
    found: dict[str, Any] = {}
    for name, metric in task.metrics.items():
        found |= {f"{name}_{one}": each for one, each in metric.items()} if _is_collection(metric) else {name: metric}
    return found


def _is_collection(metric: Any) -> bool:
    return hasattr(type(metric), "compute_groups")


def check_names(task: Task, loss: Loss) -> None:
    """Raise TaskError for a metric or count that would be mixed with another of the same name."""
    for name in (*loss.metrics, *loss.counts):
        if name in task.derived or _is_taken(name) or (name in loss.metrics and name in loss.counts):
            raise TaskError(
                f"{type(task).__name__} gives a metric or count called `{name}`, which is the name of another; rename "
                f"it.",
                field=name,
            )


def pair_of(task: Task, name: str, given: Any) -> tuple[Tensor | float, Tensor | float]:
    """A metric's sum and weight; TaskError for a single number, which can't be averaged over batches of all sizes."""
    is_pair = isinstance(given, tuple | list) and len(cast("Any", given)) == 2
    if not is_pair or not all(hasattr(number, "__float__") for number in given):
        raise TaskError(
            f"the metric `{name}` of {type(task).__name__} must be a pair (sum, weight), which is averaged as "
            f"Σsum/Σweight, but is {said(given)}; give `(correct, total)`, or `(mean * count, count)`.",
            field=name,
        )
    total, weight = given
    return total.detach() if isinstance(total, Tensor) else total, weight


def observations(task: Task, loss: Loss, microbatch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of `update` of each metric object of the task, by name, for a micro-batch."""
    if loss.observed is None:
        if loss.sum is None:
            return
        raise TaskError(
            f"{type(task).__name__} has metrics ({', '.join(task.metrics)}), but its `loss` gave no `observed` for "
            f"micro-batch {microbatch}; return `Loss(…, observed={{…}})` with the arguments of their `update`.",
            field="observed",
        )
    metrics = metrics_of(task) if loss.observed else {}
    own = {name: given for name, given in loss.observed.items() if name in metrics and isinstance(given, Mapping)}
    shared = {name: given for name, given in loss.observed.items() if name not in own}
    for name, metric in metrics.items():
        given = own.get(name, shared)
        if not given:  # all that is observed is for other metrics
            continue
        taken: dict[str, Any] = metric._filter_kwargs(**given)
        yield name, cast("dict[str, Any]", pytree.tree_map_only(Tensor, Tensor.detach, taken))


def _throughput(tasks: Mapping[str, Task]) -> Throughput:
    for task in tasks.values():
        if not isinstance(cast("object", task.unit), str) or not re.fullmatch(r"[A-Za-z0-9_-]*", task.unit):
            raise ArgumentError(
                f"`unit` of {type(task).__name__} must be one word, but is {task.unit!r}.", field="unit"
            )
    units = {task.unit for task in tasks.values()}
    own = any(task.unit or task.late_weight or type(task).weight is not Task.weight for task in tasks.values())
    losses = [f"train/{name}/loss" if name else "train/loss" for name in tasks] if own else []
    return Throughput(losses, (units.pop() if len(units) == 1 else "") or "weight")


def _is_taken(name: str) -> bool:
    return name in _TAKEN or name.startswith(_SPACES) or not name.isprintable()


def _check_metric(task: Task, name: str, metric: Any) -> None:
    if _is_taken(name) or not isinstance(metric, load_optional("torchmetrics", "torchmetrics").Metric):
        raise ArgumentError(
            f"the metric `{name}` of {type(task).__name__} must be a `torchmetrics.Metric`, of a printable name that "
            f"is none of {', '.join(_TAKEN)}, but is a {type(metric).__name__}.",
            field="metrics",
        )
