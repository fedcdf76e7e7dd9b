"""Accumulates each task's gradient by itself, and combines them when all are whole.

The plan is run once per task, so a strategy sums each task's gradient over ranks as it sums any other, and nothing is
combined before it is whole. It costs one reduction per task and, beside the gradients themselves, T copies of those of
the trained parameters; the inner products are read by the host, one wait per update. Which combination is best is the
method's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evenstep.parallel import Group
from evenstep.train.combine import Combine, Shares
from evenstep.train.passage import Gathered, Way
from evenstep.train.weigh import Weights

Accumulate = Callable[[Weights, int], Gathered]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Separately:
    """Leaves in `.grad` what a method makes of the tasks' gradients.

    Args:
        accumulate: leaves the whole gradient of the given micro-batches in `.grad`.
        combine: the method.
        parameters: those that are trained, by name.
        way: the run's.
        group: the ranks.
    """

    accumulate: Accumulate
    combine: Combine
    parameters: Mapping[str, nn.Parameter]
    way: Way
    group: Group

    def __call__(self, weights: Weights, update: int) -> Gathered:
        """Run the update's tasks one after the other, in the run's order, and combine their gradients."""
        tasks = [name for name in self.way.tasks if name in weights.totals]
        gradients: dict[str, list[Tensor | None]] = {}
        whole = Gathered()
        for name in tasks:
            one = self.accumulate(weights.of(name), update)
            gradients[name] = self._taken(one.late_total)
            whole.losses.update(one.losses)
            whole.failures.update(one.failures)
        names, parameters = list(self.parameters), list(self.parameters.values())
        having = [[name for name in tasks if gradients[name][place] is not None] for place in range(len(names))]
        seen = [place for place, those in enumerate(having) if len(those) > 1 and self.combine.looks_at(names[place])]
        shares = Shares(shared=[1.0] * len(tasks), own=[1.0] * len(tasks))
        if self.combine.needs_products:
            products = self._products([[gradients[name][place] for place in seen] for name in tasks])
            losses = self._losses(tasks, weights, whole)
            if bool(products.isfinite().all()) and bool(losses.isfinite().all()):  # else the update will be aborted
                shares = self.combine(products, losses.tolist(), tasks=tasks, seed=self.way.seed, update=update)
        for place, parameter in enumerate(parameters):
            factors = shares.shared if len(having[place]) > 1 else shares.own
            parameter.grad = _summed([gradients[name][place] for name in tasks], factors)
        return whole

    def _taken(self, late_total: Tensor | None) -> list[Tensor | None]:
        """The gradients in `.grad`, divided by a late weight; None where there is none."""
        taken = [parameter.grad for parameter in self.parameters.values()]
        if late_total is not None:
            # a late weight of 0 comes with gradients of 0, and contributes nothing
            share = torch.where(late_total > 0, 1.0 / late_total, 0.0)
            for gradient in taken:
                if gradient is not None:
                    gradient.mul_(share.to(gradient.dtype))
        for parameter in self.parameters.values():
            parameter.grad = None
        return taken

    def _losses(self, tasks: Sequence[str], weights: Weights, whole: Gathered) -> Tensor:
        """Σ S_m / divisor of each task over all ranks, in the order of the micro-batches whoever ran them."""
        each = torch.zeros(len(tasks), weights.num_microbatches, dtype=torch.float64)
        for microbatch, (name, loss) in whole.losses.items():
            each[tasks.index(name), microbatch] = loss.double().cpu() / weights.divisors[microbatch]
        summed = self.group.sum_floats(each.flatten().tolist())
        return torch.tensor(summed, dtype=torch.float64).view_as(each).sum(1)

    def _products(self, rows: list[list[Tensor | None]]) -> Tensor:
        """⟨g_s, g_t⟩ without the loss scale, in float64 on the CPU."""
        device = self.way.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        products = torch.zeros(len(rows), len(rows), dtype=dtype, device=device)
        for i, row in enumerate(rows):
            for j, other in enumerate(rows[: i + 1]):
                pairs = [(a, b) for a, b in zip(row, other, strict=True) if a is not None and b is not None]
                if pairs:
                    dots = [torch.dot(a.flatten().to(dtype), b.flatten().to(dtype)) for a, b in pairs]
                    products[i, j] = products[j, i] = torch.stack(dots).sum()
        return products.cpu().double() / self.way.precision.scale**2


def _summed(gradients: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    """Σ factor · gradient over those that there are, in place of the first."""
    total: Tensor | None = None
    for gradient, factor in zip(gradients, factors, strict=True):
        if gradient is not None:
            scaled = gradient if factor == 1.0 else gradient.mul_(factor)
            total = scaled if total is None else total.add_(scaled)
    return total
