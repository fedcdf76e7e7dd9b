"""Accumulates tasks' gradients by themselves, and combines them when all are whole.

The plan is run once per task, so a strategy sums each task's gradient over ranks as it sums any other, and nothing is
combined before it is whole. It costs one reduction per task and, beside the gradients themselves, T copies of those of
the trained parameters; the inner products are read by the host, one wait per update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evenstep.internals import local_tensor
from evenstep.keys import key
from evenstep.train.tasks.weighting import Combine, TaskWeights
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.weigh import Weights

Accumulate = Callable[[Weights, int], MicrobatchResults]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerTaskGradients:
    """Leaves in `.grad` what a method makes of the tasks' gradients.

    Args:
        accumulate: leaves the whole gradient of the given micro-batches in `.grad`.
        parameters: those that are trained, by name.
        execution: on which ranks, and how they share gradients.
    """

    accumulate: Accumulate
    combine: Combine
    parameters: Mapping[str, nn.Parameter]
    context: TrainContext
    execution: Execution

    def __call__(self, weights: Weights, update: int) -> MicrobatchResults:
        """Run the update's tasks one after the other, in the run's order, and combine their gradients."""
        tasks = [name for name in self.context.tasks if name in weights.totals]
        gradients: dict[str, list[Tensor | None]] = {}
        late: dict[str, Tensor] = {}
        whole = MicrobatchResults()
        for name in tasks:
            one = self.accumulate(weights.of(name), update)
            gradients[name] = _take_gradients(self.parameters, one.late_total)
            whole.losses.update(one.losses)
            if one.late_total is not None:
                late[name] = one.late_total
        if late:
            of_others = math.fsum(weights.totals[name] for name in tasks if name not in late)
            whole.total = torch.stack([*late.values()]).sum() + of_others
        names, parameters = list(self.parameters), list(self.parameters.values())
        having = [[name for name in tasks if gradients[name][place] is not None] for place in range(len(names))]
        seen = [place for place, those in enumerate(having) if len(those) > 1 and self.combine.looks_at(names[place])]
        shares = TaskWeights(shared=[1.0] * len(tasks), own=[1.0] * len(tasks))
        if self.combine.needs_products:
            products = self._products([[gradients[name][place] for name in tasks] for place in seen], len(tasks))
            losses = self._losses(tasks, weights, whole, late)
            if bool(products.isfinite().all()) and bool(losses.isfinite().all()):  # else the update will be aborted
                shares = self._shares(products, losses.tolist(), tasks, update)
        for place, parameter in enumerate(parameters):
            factors = shares.shared if len(having[place]) > 1 else shares.own
            parameter.grad = _sum_gradients([gradients[name][place] for name in tasks], factors)
        return whole

    def _shares(self, products: Tensor, losses: list[float], tasks: list[str], update: int) -> TaskWeights:
        context = self.context
        with context.randomness.keyed(context.device, key(context.seed, "combine", update)):
            return self.combine(products, losses, tasks=tasks, seed=context.seed, update=update)

    def _losses(
        self, tasks: Sequence[str], weights: Weights, whole: MicrobatchResults, late: Mapping[str, Tensor]
    ) -> Tensor:
        each = torch.zeros(len(tasks), weights.num_microbatches, dtype=torch.float64)
        for microbatch, (name, loss) in whole.losses.items():
            each[tasks.index(name), microbatch] = loss.double().cpu() / weights.divisors[name]
        summed = self.execution.group.sum_floats(each.flatten().tolist())
        divisors = torch.tensor([float(late.get(name, 1.0)) for name in tasks], dtype=torch.float64)
        of_tasks = torch.tensor(summed, dtype=torch.float64).view_as(each).sum(1)
        return torch.where(divisors > 0, of_tasks / divisors, 0.0)

    def _products(self, columns: list[list[Tensor | None]], count: int) -> Tensor:
        device, layout = self.context.device, self.execution.reducers.layout
        dtype = torch.float32 if device.type == "mps" else torch.float64
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]
        dots: dict[tuple[int, int], list[Tensor]] = {pair: [] for pair in pairs}
        for column in columns:
            local = [None if one is None else layout.local_shard(one).flatten().to(dtype) for one in column]
            for i, j in pairs:
                one, other = local[i], local[j]
                if one is not None and other is not None:
                    dots[i, j].append(torch.dot(one, other))
        products = torch.zeros(count, count, dtype=dtype, device=device)
        for (i, j), some in dots.items():
            if some:
                products[i, j] = products[j, i] = torch.stack(some).sum()
        layout.all_reduce_shards(products)
        return products.cpu().double() / self.context.loss_scale.value**2


def _take_gradients(parameters: Mapping[str, nn.Parameter], late_total: Tensor | None) -> list[Tensor | None]:
    """Take the gradients out of `.grad`, divided by a late weight.

    If that is 0 they are None on the CPU, so that the optimizer leaves a head of the task alone. On an accelerator,
    which is not waited for, they are 0, so weight decay and momentum move the head.
    """
    gradients: list[Tensor | None] = [parameter.grad for parameter in parameters.values()]
    if late_total is not None and late_total.device.type == "cpu" and late_total == 0:
        gradients = [None] * len(gradients)
    elif late_total is not None:
        share = torch.where(late_total > 0, 1.0 / late_total, 0.0)
        for gradient in gradients:
            if gradient is not None:
                local_tensor(gradient).mul_(share.to(gradient.dtype))
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def _sum_gradients(gradients: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    """Σ factor · gradient in the memory of the first gradient; None without any."""
    total: Tensor | None = None
    for gradient, factor in zip(gradients, factors, strict=True):
        if gradient is not None:
            if factor != 1.0:
                local_tensor(gradient).mul_(factor)
            if total is None:
                total = gradient
            else:
                local_tensor(total).add_(local_tensor(gradient))
    return total
