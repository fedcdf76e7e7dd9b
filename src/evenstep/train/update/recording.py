"""Checks a task's loss of one micro-batch, and records its metrics as (sum, weight) pairs on the device."""

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from evenstep.data import Microbatch
from evenstep.errors import TaskError
from evenstep.tensors import scalar_on
from evenstep.train.cut import SubBatch
from evenstep.train.tasks.metrics import check_names, no_pair, observations
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.weigh import Weights

_16_BITS = frozenset({torch.float16, torch.bfloat16})
_ALONE = Loss(None)  # what comes with a loss that is a plain tensor: nothing


@final
class Recording:
    """Losses, weights and metrics of one set of micro-batches.

    Args:
        update: number of the update that metrics are recorded under.
        prefix: of the metrics' names.

    Attributes:
        late_weights: what losses gave as weights, by the micro-batches' numbers.
        gathered: the losses, and what tasks have raised.
    """

    __slots__ = ("_context", "_late", "_prefix", "_update", "_weights", "gathered", "late_weights")

    def __init__(self, context: TrainContext, weights: Weights, update: int, prefix: str) -> None:
        self._context, self._weights = context, weights
        self._update, self._prefix = update, prefix
        self.late_weights: dict[int, Tensor] = {}
        self._late: dict[int, tuple[str, Tensor | float]] = {}  # losses that wait for Σw, with the names of their tasks
        self.gathered = MicrobatchResults()

    def take(
        self, task: Task, one: Microbatch, piece: SubBatch, loss: Loss | Tensor | None, *, method: str = "loss"
    ) -> Tensor | None:
        """Check and record what the task gave for `piece` of a micro-batch; gives the sum to go back from.

        Args:
            method: of the task, that gave it; what `evaluate` gives need have no loss.
        """
        if loss is None and not one.task:  # with one task, more likely a forgotten `return` than a batch without a loss
            raise TaskError(
                f"`{type(task).__name__}.{method}` must give a 0-dim tensor, or a `Loss` of one, but gave None for "
                f"micro-batch {one.index}; return the loss summed over the batch's units, or `Loss(None)` for a batch "
                f"that has none."
            )
        if not isinstance(loss, Loss):
            return self._record(task, one, piece, _ALONE, _checked(task, loss, None, one.index, method))
        if task.late_weight and loss.weight is None and loss.count is not None:
            loss = replace(loss, weight=loss.count)
        if loss.count is not None and torch.is_grad_enabled() and _is_known_to_be_nothing(loss.count):
            loss = replace(loss, sum=None)  # a mean over nothing is 0 / 0, and so is its gradient
        if loss.sum is None and method == "evaluate":
            return self._record_without_loss(task, one, piece, loss)
        return self._record(task, one, piece, loss, _checked(task, loss.sum, loss.weight, one.index, method))

    def take_alone(self, one: Microbatch, total: Tensor) -> None:
        name = f"{self._prefix}{one.task}/loss" if one.task else f"{self._prefix}loss"
        self._context.storage.put(name, total, self._weights.each[one.index], update=self._update)
        self.gathered.losses[one.index] = one.task, total

    def _record(self, task: Task, one: Microbatch, piece: SubBatch, loss: Loss, total: Tensor | None) -> Tensor | None:
        put, update = self._context.storage.put, self._update
        prefix = f"{self._prefix}{one.task}/" if one.task else self._prefix
        is_plain = loss is _ALONE and not piece.path
        weight = self._weights.each[one.index] if is_plain else self._weight_of(one, piece, loss)
        if loss is not _ALONE or task.metrics:
            self._record_told(task, one, loss, prefix)
        if total is None:
            put(prefix + "loss", 0.0, weight, update=update)
            put(prefix + "no_loss", 1.0, update=update)
            if one.task and torch.is_grad_enabled():
                self.add_to_all(one, 0.0, weight)
            return None
        detached = total.detach() if total.requires_grad else total
        put(prefix + "loss", detached, weight, update=update)
        earlier = self.gathered.losses.get(one.index)  # of another piece
        self.gathered.losses[one.index] = one.task, detached if earlier is None else earlier[1] + detached
        return self._trained(one, total, weight) if one.task and torch.is_grad_enabled() else total

    def _record_without_loss(self, task: Task, one: Microbatch, piece: SubBatch, loss: Loss) -> None:
        prefix = f"{self._prefix}{one.task}/" if one.task else self._prefix
        self._record_told(task, one, loss, prefix)
        has_none = task.late_weight and loss.weight is None
        weight = 1.0 if has_none else self._weight_of(one, piece, loss)
        self._context.storage.count(prefix, weight, update=self._update)  # that of what is derived here

    def _record_told(self, task: Task, one: Microbatch, loss: Loss, prefix: str) -> None:
        storage, update = self._context.storage, self._update
        if loss.metrics or loss.counts:
            check_names(task, loss)
        for name, pair in loss.metrics.items():
            metric_sum, metric_weight = _pair(task, name, pair)
            storage.put(prefix + name, metric_sum, metric_weight, update=update)
        for name, count in loss.counts.items():
            storage.count(prefix + name, count.detach() if isinstance(count, Tensor) else count, update=update)
        for name, value in loss.shown.items():
            storage.show(prefix + name, value, update=update)
        if task.metrics:
            for name, seen in observations(task, loss, one.index):
                storage.observe(self._prefix, f"{one.task}/{name}" if one.task else name, seen, update=update)

    def _weight_of(self, one: Microbatch, piece: SubBatch, loss: Loss) -> float | Tensor:
        if loss.weight is not None:
            weight = scalar_on(loss.weight, self._context.device).detach()
            earlier = self.late_weights.get(one.index)
            self.late_weights[one.index] = weight if earlier is None else earlier + weight
            return weight
        if piece.path:
            what = f"a part of micro-batch {one.index}"
            return weight_of(self._context.tasks[one.task], piece.data, what, piece.num_samples)
        return self._weights.each[one.index]

    def _trained(self, one: Microbatch, total: Tensor, weight: float | Tensor) -> Tensor:
        trained = self._context.coefficients.weighted(one.task, total, weight)
        self.add_to_all(one, trained.detach(), weight)
        return trained

    def add_to_all(self, one: Microbatch, trained: Tensor | float, weight: float | Tensor) -> None:
        context, weights, name = self._context, self._weights, one.task
        if isinstance(weight, Tensor):
            _, earlier = self._late.get(one.index, (name, 0.0))  # of another piece
            self._late[one.index] = name, earlier + trained
            return
        scaled = trained * (context.coefficients.value(name, self._update) / weights.divisors[name])
        part = weight / weights.totals[name] / weights.num_tasks
        context.storage.put(f"{self._prefix}loss", scaled, part, update=self._update)

    def settle_late(self, total: Tensor) -> None:
        context, weights = self._context, self._weights
        for name, trained in self._late.values():
            factor = torch.where(total > 0, context.coefficients.value(name, self._update) / total, 0.0)
            part = 1.0 / weights.totals[name] / weights.num_tasks
            context.storage.put(f"{self._prefix}loss", trained * factor, part, update=self._update)


def _pair(task: Task, name: str, given: Any) -> tuple[Tensor | float, Tensor | float]:
    if isinstance(given, Tensor):  # of two numbers, which need not be a sum and its weight
        raise no_pair(task, name, given)
    try:
        metric_sum, metric_weight = given
    except (TypeError, ValueError) as error:
        raise no_pair(task, name, given) from error
    for number in (metric_sum, metric_weight):
        if not hasattr(number, "__float__"):
            raise no_pair(task, name, given)
    return metric_sum.detach() if isinstance(metric_sum, Tensor) else metric_sum, metric_weight


def _checked(task: Task, total: Any, weight: object, microbatch: int, method: str) -> Tensor | None:
    if total is None or (isinstance(total, Tensor) and total.ndim and total.numel() == 0):
        if weight is not None or not task.late_weight:
            return None
    elif (
        isinstance(total, Tensor)
        and total.ndim == 0
        and total.is_floating_point()
        and (total.requires_grad or not torch.is_grad_enabled())
        and (weight is not None) == task.late_weight
    ):
        # A sum over many units outgrows 16 bits long before its terms do.
        return total.float() if total.dtype in _16_BITS else total
    raise TaskError(f"`{type(task).__name__}.{method}` must give {_fault(task, total, weight, microbatch)}")


def _fault(task: Task, total: Any, given: object, microbatch: int) -> str:
    here = f"for micro-batch {microbatch}"
    weight = (
        f"a weight if, and only if, the task says `late_weight = True`, but {here} `late_weight` is "
        f"{task.late_weight} and the weight it gave is {given}."
    )
    if total is None:
        return weight
    if not isinstance(total, Tensor):
        return (
            f"a 0-dim tensor, or a `Loss` of one, but gave {type(total).__name__} {here}; return the summed loss "
            f"as a tensor, without `.item()`, and log other values by `Loss(sum, metrics={{name: (sum, weight)}})`."
        )
    if total.ndim or not total.is_floating_point():
        return (
            f"one floating-point number, but gave a tensor of shape {list(total.shape)} and {total.dtype} {here}; "
            f'sum it, for instance with reduction="sum", or `.sum()` of one loss per sample.'
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        return (
            f"a loss that can be trained, but gave one that depends on no trainable parameter {here}; compute it "
            f"from the model's output, without `detach` or `no_grad`, and leave a parameter `requires_grad`."
        )
    return weight


def _is_known_to_be_nothing(count: Tensor | float) -> bool:
    if isinstance(count, Tensor):
        return bool(count.numel() == 1 and count.device.type == "cpu" and count == 0)
    return count == 0
