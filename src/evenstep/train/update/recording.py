"""Checks losses of micro-batches, and records their metrics as (sum, weight) pairs on the device."""

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from evenstep.data import Microbatch
from evenstep.errors import TaskError
from evenstep.tensors import scalar_on
from evenstep.train.tasks.metrics import LaterMetrics, check_names, observations, pair_of
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.weigh import Weights

_16_BITS = frozenset({torch.float16, torch.bfloat16})


@final
class Recording:
    """Losses, weights and metrics of one set of micro-batches.

    Args:
        update: number of the update that metrics are recorded under.
        prefix: of the metrics' names.
        method: of tasks, that gives what is recorded; `evaluate` need give no loss.

    Attributes:
        losses: the summed losses with the names of their tasks, by the micro-batches' numbers.
        late_weights: weights that came with losses, by the micro-batches' numbers.
    """

    def __init__(
        self, context: TrainContext, weights: Weights, update: int, prefix: str, *, method: str = "loss"
    ) -> None:
        self.losses: dict[int, tuple[str, Tensor]] = {}
        self.late_weights: dict[int, Tensor] = {}
        self._context = context
        self._weights = weights
        self._update = update
        self._prefix = prefix
        self._method = method
        self._late: dict[int, tuple[str, Tensor | float]] = {}  # losses that wait for Σw, with the names of their tasks

    def take(self, task: Task, one: Microbatch, seen: Any) -> Tensor | None:
        """Check and record the loss of a micro-batch, or of a piece of one; gives the sum to go back from."""
        if seen is None and not one.task:  # with one task, more likely a forgotten `return` than a batch without a loss
            raise self._error(task, one, "a 0-dim tensor, or a `Loss` (`Loss(None)` for none)", "None")
        loss: Loss = seen if isinstance(seen, Loss) else Loss(seen)
        if task.late_weight and loss.weight is None and loss.count is not None:
            loss = replace(loss, weight=loss.count)
        if loss.count is not None and torch.is_grad_enabled() and _is_known_to_be_zero(loss.count):
            loss = replace(loss, sum=None)  # a mean over nothing is 0 / 0, and so is its gradient
        is_without_loss = loss.sum is None and self._method == "evaluate"
        total = None if is_without_loss else self._checked(task, one, loss.sum, loss.weight)
        weight: float | Tensor = 1.0
        if not is_without_loss or not task.late_weight or loss.weight is not None:
            weight = self._weight(task, one, loss.weight)
        if task.metrics or isinstance(seen, Loss):
            self._record_metrics(task, one, loss)
        if is_without_loss:
            self._context.storage.count(self._prefix_of(one), weight, update=self._update)  # for derived metrics
            return None
        self.record_loss(one, total, weight)
        if not one.task or not torch.is_grad_enabled():
            return total
        trained = None if total is None else self._context.coefficients.weighted(one.task, total, weight)
        self.add_to_all(one, 0.0 if trained is None else trained.detach(), weight)
        return trained

    def record_loss(self, one: Microbatch, total: Tensor | None, weight: float | Tensor) -> None:
        """Record a checked loss."""
        put, prefix, update = self._context.storage.put, self._prefix_of(one), self._update
        if total is None:
            put(prefix + "loss", 0.0, weight, update=update)
            put(prefix + "no_loss", 1.0, update=update)
            return
        detached = total.detach() if total.requires_grad else total
        put(prefix + "loss", detached, weight, update=update)
        earlier = self.losses.get(one.index)  # of another piece
        self.losses[one.index] = one.task, detached if earlier is None else earlier[1] + detached

    def add_to_all(self, one: Microbatch, trained: Tensor | float, weight: float | Tensor) -> None:
        """Add a task's loss to the loss of all tasks, with its coefficient."""
        name = one.task
        if isinstance(weight, Tensor):
            _, earlier = self._late.get(one.index, (name, 0.0))  # of another piece
            self._late[one.index] = name, earlier + trained
            return
        self._put_of_all(name, trained, self._coefficient(name) / self._weights.divisors[name], weight)

    def settle_late(self, total: Tensor) -> None:
        """Add the losses of a task with a late weight, whose total is known now."""
        for name, trained in self._late.values():
            self._put_of_all(name, trained, torch.where(total > 0, self._coefficient(name) / total, 0.0), 1.0)

    def _put_of_all(self, name: str, trained: Tensor | float, factor: Tensor | float, weight: float) -> None:
        part = weight / self._weights.totals[name] / self._weights.num_tasks
        self._context.storage.put(f"{self._prefix}loss", trained * factor, part, update=self._update)

    def _coefficient(self, name: str) -> float:
        return self._context.coefficients.value(name, self._update)

    def _prefix_of(self, one: Microbatch) -> str:
        return f"{self._prefix}{one.task}/" if one.task else self._prefix

    def _record_metrics(self, task: Task, one: Microbatch, loss: Loss) -> None:
        storage, prefix, update = self._context.storage, self._prefix_of(one), self._update
        if loss.metrics or loss.counts:
            check_names(task, loss)
        for name, pair in loss.metrics.items():
            storage.put(prefix + name, *pair_of(task, name, pair), update=update)
        for name, count in loss.counts.items():
            storage.count(prefix + name, count.detach() if isinstance(count, Tensor) else count, update=update)
        for name, value in loss.shown.items():
            storage.show(prefix + name, value, update=update)
        for name, seen in observations(task, loss, one.index) if task.metrics else ():
            key = f"{one.task}/{name}" if one.task else name
            later = task.metrics[name] if isinstance(task.metrics, LaterMetrics) else None
            storage.observe(self._prefix, key, seen, update=update, later=later)

    def _weight(self, task: Task, one: Microbatch, given: Tensor | float | None) -> float | Tensor:
        if given is not None:
            weight = scalar_on(given, self._context.device).detach()
            earlier = self.late_weights.get(one.index)
            self.late_weights[one.index] = weight if earlier is None else earlier + weight
            return weight
        if one.part:
            return weight_of(task, one.data, f"a part of micro-batch {one.index}", one.known_samples)
        return self._weights.each[one.index]

    def _checked(self, task: Task, one: Microbatch, total: Any, weight: Tensor | float | None) -> Tensor | None:
        """The summed loss, at least 32 bits wide; None for a loss of 0."""
        if isinstance(total, Tensor) and total.ndim and total.numel() == 0:
            total = None
        is_late = weight is not None
        if total is None and (is_late or not task.late_weight):
            return None
        if is_late != task.late_weight:
            must = "a weight if, and only if, the task says `late_weight = True`"
            raise self._error(task, one, must, f"the weight {weight} while `late_weight` is {task.late_weight}")
        if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
            given = f"{list(total.shape)} of {total.dtype}" if isinstance(total, Tensor) else type(total).__name__
            must = "one floating-point number as a 0-dim tensor, the sum over the batch's units"
            raise self._error(task, one, must, given)
        if torch.is_grad_enabled() and not total.requires_grad:
            must = "a loss that can be trained, computed from the model's output without `detach` or `no_grad`"
            raise self._error(task, one, must, "one that depends on no trainable parameter")
        # a sum over many units outgrows 16 bits long before its terms do
        return total.float() if total.dtype in _16_BITS else total

    def _error(self, task: Task, one: Microbatch, must: str, given: str) -> TaskError:
        return TaskError(
            f"`{type(task).__name__}.{self._method}` must give {must}, but gave {given} for micro-batch {one.index}.",
            field=self._method,
        )


def _is_known_to_be_zero(count: Tensor | float) -> bool:
    if isinstance(count, Tensor):
        return bool(count.numel() == 1 and count.device.type == "cpu" and count == 0)
    return count == 0
