"""Adds the gradients of several tasks, one of which gives its weight with its loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from evenstep.internals import local_tensor
from evenstep.plugins import PER_TASK_GRADIENTS, load
from evenstep.train.tasks.combine import Combine, Separate
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.weigh import Weights

Accumulate = Callable[[Weights, int], MicrobatchResults]


def accumulate_late(
    weights: Weights,
    update: int,
    *,
    accumulate: Accumulate,
    parameters: Mapping[str, nn.Parameter],
    context: TrainContext,
) -> MicrobatchResults:
    """Leave in `.grad` the sum of the tasks' gradients, of which some are divided by a weight that came late.

    Each task with a late weight is run by itself, and all others together."""
    late = [(name,) for name in weights.totals if context.tasks[name].late_weight]
    others = tuple(name for name in weights.totals if (name,) not in late)
    whole, total = MicrobatchResults(), list[Tensor | None]()
    for names in [*late, others] if others else late:
        one = accumulate(weights.of(*names), update)
        whole.add(one)
        own = take_gradients(parameters, one.late_total)
        total = [sum_gradients(pair, (1.0, 1.0)) for pair in zip(total, own, strict=True)] if total else own
    for parameter, gradient in zip(parameters.values(), total, strict=True):
        parameter.grad = gradient
    return whole


def build_gather(
    accumulate: Accumulate,
    combine: Combine,
    parameters: Mapping[str, nn.Parameter],
    context: TrainContext,
    execution: Execution,
) -> Accumulate:
    if isinstance(combine, Separate):
        return partial(accumulate_late, accumulate=accumulate, parameters=parameters, context=context)
    method = load(PER_TASK_GRADIENTS)
    return method(accumulate=accumulate, combine=combine, parameters=parameters, context=context, execution=execution)


def take_gradients(parameters: Mapping[str, nn.Parameter], late_total: Tensor | None) -> list[Tensor | None]:
    """The gradients in `.grad`, which is then empty, divided by a late weight; None where there is none.

    Of a late weight of 0 there are none, as of one that was counted before, so that the optimizer leaves a head of the
    task alone. On an accelerator, which is not waited for, they are 0: weight decay and momentum move the head there.
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


def sum_gradients(gradients: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    """Σ factor · gradient over those that there are, in place of the first."""
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
