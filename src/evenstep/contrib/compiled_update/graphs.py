"""Updates as graphs: gradients of all micro-batches, their norm, and the step that they make.

Nothing in a graph looks at what tensors hold: whether the gradient is finite selects old or new values on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from evenstep.contrib.compiled_update.compilations import only_compiled
from evenstep.contrib.compiled_update.formulas import Formula
from evenstep.internals import pytree
from evenstep.optim.apply import CLIP_EPSILON
from evenstep.pipeline.layers import arguments
from evenstep.train.tasks.task import Loss, Task
from evenstep.train.update.microbatch import TrainContext

Told: TypeAlias = tuple[Tensor | None, Mapping[str, Any], Mapping[str, Any] | None, Mapping[str, Any]]
"""Outputs of a micro-batch: the loss without its graph, metrics, arguments of metric objects, and counts."""

FIXED = ("held", "numbers", "step", "context", "trained", "moving", "autocasts")
"""Arguments of an update's function, and names in it, that never change."""


class Held(NamedTuple):
    """Tensors of a step: parameters with their state, step counts, moving buffers, all with an average and that."""

    parameters: list[Tensor]
    kept: list[list[Tensor]]
    counts: list[Tensor]
    buffers: list[Tensor]
    averaged: list[tuple[Tensor, Tensor]]


def function_of(
    model: nn.Module,
    context: TrainContext,
    tasks: tuple[Task, ...],
    trained: list[tuple[str, ...]],
    moving: list[tuple[str, ...]],
    step: "Step",
) -> Callable[..., Any]:
    """The function of an update. Parameters and moving buffers are given by all their names in the model."""
    autocasts = isinstance(context.precision.forward(context.device), torch.autocast)

    def loss_function(task: Task, batch: Any, factor: Tensor, tree: list[Any]) -> Callable[..., Any]:
        def loss_of(parameters: list[Tensor], buffers: list[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
            pairs = [*zip(trained, parameters, strict=True), *zip(moving, buffers, strict=True)]
            named = {name: one for names, one in pairs for name in names}
            with context.precision.forward(context.device) if autocasts else nullcontext():
                positional, keywords = arguments((), context.inputs(task, batch), True)
                # all places have names: torch would search the model, and compare all that it saw at each call
                output = functional_call(model, named, positional, keywords, tie_weights=False)
                loss = task.loss(context.output(output), batch)
            if not isinstance(loss, Loss):
                loss = Loss(loss)
            total = loss.sum
            if total is None or total.numel() == 0:
                total, alone = torch.zeros_like(factor), None
            else:
                total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
                alone = total
            leaves, spec = pytree.tree_flatten((alone, dict(loss.metrics), loss.observed, dict(loss.counts)))
            tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
            tree.extend(([None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec))
            return total * factor, (tuple(tensors), [named[names[0]] for names in moving])

        return loss_of

    def update(
        held: Held, batches: list[Any], numbers: Tensor, halted: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Told]]:
        only_compiled()
        each = numbers.unbind(0)
        buffers = [one.clone() for one in held.buffers]  # forwards write to these, and the update may be aborted
        sums: list[Tensor] = []
        told: list[Told] = []
        for task, batch, factor in zip(tasks, batches, each[len(each) - len(batches) :], strict=True):
            tree: list[Any] = []
            compute = grad_and_value(loss_function(task, batch, factor, tree), has_aux=True)
            found, (_, (seen, buffers)) = cast("Any", compute)(held.parameters, buffers)
            told.append(_filled(tree, seen))
            sums = [total + one for total, one in zip(sums, found, strict=True)] if sums else list(found)
        norm, aborted = step(held, buffers, sums, each, halted)
        return norm, aborted, told

    return update


def _filled(tree: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    leaves, spec = tree
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if leaf is None else leaf[0] for leaf in leaves], spec)


@final
@dataclass(frozen=True, slots=True)
class Step:
    """Clips a finite gradient and takes the step of the optimizer and of the average.

    Each parameter has a formula, and the begin of its row among the numbers.
    """

    formulas: tuple[Formula, ...]
    starts: tuple[int, ...]
    clip_norm: float | None

    def __call__(
        self,
        held: Held,
        moved: list[Tensor],
        gradients: list[Tensor],
        numbers: Sequence[Tensor],
        halted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Step the held tensors in place, from gradients times the loss scale; gives ‖g‖₂, and 1 for an abort."""
        scale, share = numbers[0], numbers[1]
        wide = torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32
        each = torch.stack([torch.linalg.vector_norm(one, dtype=wide) for one in gradients])
        norm = each.dot(each).sqrt() / scale
        finite = norm.isfinite() if halted is None else norm.isfinite() & (halted == 0)
        divisor = scale
        if self.clip_norm is not None:
            divisor = scale * ((norm + CLIP_EPSILON) / self.clip_norm).clamp(min=1.0)
        for number, (parameter, state, gradient) in enumerate(zip(held.parameters, held.kept, gradients, strict=True)):
            formula, start = self.formulas[number], self.starts[number]
            row = numbers[start : start + formula.width]
            after, states = formula.step(parameter, gradient / divisor.to(gradient.dtype), state, row)
            _select(finite, parameter, after)
            for old, new in zip(state, states, strict=True):
                _select(finite, old, new)
        for old, new in zip(held.buffers, moved, strict=True):
            _select(finite, old, new)
        for count in held.counts:
            _select(finite, count, count + 1)
        for live, average in held.averaged:
            if average.is_floating_point():
                _select(finite, average, torch.lerp(average, live.to(average.dtype), share.to(average.dtype)))
            else:
                _select(finite & (share > 0), average, live)
        return norm, (~finite).float()


def _select(taken: Tensor, old: Tensor, new: Tensor) -> None:
    old.copy_(torch.where(taken, new, old))
