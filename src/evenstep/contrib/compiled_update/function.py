"""One update as a pure function of tensors, in two halves: gradients of all micro-batches, and the step that they make.

Nothing here looks at what tensors hold: whether the gradient is finite selects old or new values on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from evenstep.contrib.compiled_update.checks import check_shows_nothing
from evenstep.contrib.compiled_update.formulas import Formula
from evenstep.internals import pytree
from evenstep.optim.apply import CLIP_EPSILON
from evenstep.pipeline.layers import arguments
from evenstep.train.tasks.task import Loss, Task
from evenstep.train.update.context import TrainContext

Told: TypeAlias = tuple[Tensor | None, Mapping[str, Any], Mapping[str, Any] | None, Mapping[str, Any]]
"""What a task made of a micro-batch: the loss without its graph, metrics, what its metric objects see, and counts."""

HEAD = 2  # the numbers that come first: the loss scale, and the share by which the average moves


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Computes the summed gradients of micro-batches.

    Args:
        tasks: task of each micro-batch.
        trained: trained parameters, each by all its names in the model.
        moving: buffers that forwards move, likewise.
        autocasts: True if the precision autocasts.
    """

    model: nn.Module
    context: TrainContext
    tasks: tuple[Task, ...]
    trained: tuple[tuple[str, ...], ...]
    moving: tuple[tuple[str, ...], ...]
    autocasts: bool

    def __call__(
        self, parameters: list[Tensor], buffers: list[Tensor], batches: Sequence[Any], factors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Told]]:
        """Σ factor·∇S over the micro-batches in their order, the buffers after the last, and outputs of each."""
        buffers = [one.clone() for one in buffers]  # forwards write to these, and the update may be aborted
        sums: list[Tensor] = []
        told: list[Told] = []
        for task, batch, factor in zip(self.tasks, batches, factors, strict=True):
            tree: list[Any] = []
            compute = grad_and_value(self._loss_of(task, batch, factor, tree), has_aux=True)
            found, (_, (seen, buffers)) = cast("Any", compute)(parameters, buffers)
            told.append(_filled(tree, seen))
            sums = [total + one for total, one in zip(sums, found, strict=True)] if sums else list(found)
        return sums, buffers, told

    def _loss_of(self, task: Task, batch: Any, factor: Tensor, tree: list[Any]) -> Callable[..., Any]:
        context, model = self.context, self.model

        def loss_of(parameters: list[Tensor], buffers: list[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
            pairs = [*zip(self.trained, parameters, strict=True), *zip(self.moving, buffers, strict=True)]
            held = {name: one for names, one in pairs for name in names}
            with context.precision.forward(context.device) if self.autocasts else nullcontext():
                positional, named = arguments((), context.inputs(task, batch), True)
                # all places have names: torch would search the model, and compare all that it saw at each call
                output = functional_call(model, held, positional, named, tie_weights=False)
                loss = task.loss(context.output(task, output, batch), batch)
            if not isinstance(loss, Loss):
                loss = Loss(loss)
            check_shows_nothing([*loss.shown])  # also in a later update, which traces a new graph
            total = loss.sum
            if total is None or total.numel() == 0:
                total, alone = torch.zeros_like(factor), None
            else:
                total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
                alone = total
            leaves, spec = pytree.tree_flatten((alone, dict(loss.metrics), loss.observed, dict(loss.counts)))
            tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
            tree.extend(([None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec))
            return total * factor, (tuple(tensors), [held[names[0]] for names in self.moving])

        return loss_of


def _filled(tree: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """The tree of leaves, each in a tuple or None for the next tensor, and its structure."""
    leaves, spec = tree
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if leaf is None else leaf[0] for leaf in leaves], spec)


class Held(NamedTuple):
    """Tensors of a step.

    Args:
        parameters: stepped parameters.
        kept: state of each, in the order of its formula.
        counts: step counts, stacked by device and format.
        ones: increment of each count: 1, or 0 for a parameter that is not stepped.
        averages: tensors of the average.
        still: followed tensors that the update leaves alone.
    """

    parameters: list[Tensor]
    kept: list[list[Tensor]]
    counts: list[Tensor]
    ones: list[Tensor]
    averages: list[Tensor]
    still: list[Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Clips a finite gradient and takes the step of the optimizer and of the average.

    Args:
        formulas: formula of each parameter.
        rows: row of numbers of each parameter.
        starts: begin of each row among the numbers.
        clip_norm: None does not clip.
        averaged: number of each followed tensor among parameters and moved buffers; -1 if the update leaves it alone.
    """

    formulas: tuple[Formula, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    clip_norm: float | None
    averaged: tuple[int, ...]

    def __call__(
        self,
        held: Held,
        buffers: list[Tensor],
        moved: list[Tensor],
        gradients: list[Tensor],
        numbers: Sequence[Tensor],
        halted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Change parameters, state, buffers and averages in place; gives ‖g‖₂ before clipping, and 1 for an abort.

        Args:
            buffers: buffers before the update; `moved` are those after its forwards.
            gradients: gradients times the loss scale.
            numbers: the loss scale, the share by which the average moves, and the rows.
            halted: 1 until the host has handled an earlier abort, or None.
        """
        scale, share = numbers[0], numbers[1]
        norm = _norm(gradients) / scale
        finite = norm.isfinite() if halted is None else norm.isfinite() & (halted == 0)
        divisor = scale
        if self.clip_norm is not None:
            divisor = scale * ((norm + CLIP_EPSILON) / self.clip_norm).clamp(min=1.0)
        for number, (parameter, state, gradient) in enumerate(zip(held.parameters, held.kept, gradients, strict=True)):
            formula, start = self.formulas[number], self.starts[self.rows[number]]
            row = numbers[start : start + formula.width]
            after, states = formula(parameter, gradient / divisor.to(gradient.dtype), state, row)
            _select(finite, parameter, after)
            for old, new in zip(state, states, strict=True):
                _select(finite, old, new)
        for old, new in zip(buffers, moved, strict=True):
            _select(finite, old, new)
        for count, one in zip(held.counts, held.ones, strict=True):
            _select(finite, count, count + one)
        followed, rest = [*held.parameters, *buffers], iter(held.still)
        for place, average in zip(self.averaged, held.averages, strict=True):
            value = followed[place] if place >= 0 else next(rest)
            if average.is_floating_point():
                _select(finite, average, torch.lerp(average, value.to(average.dtype), share.to(average.dtype)))
            else:
                _select(finite & (share > 0), average, value)
        return norm, (~finite).float()


def _norm(gradients: list[Tensor]) -> Tensor:
    wide = torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32
    each = torch.stack([torch.linalg.vector_norm(one, dtype=wide) for one in gradients])
    return each.dot(each).sqrt()


def _select(taken: Tensor, old: Tensor, new: Tensor) -> None:
    old.copy_(torch.where(taken, new, old))
