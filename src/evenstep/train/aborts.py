"""Causes of aborted updates: kind of incident, micro-batches, module, and the error if the run ends.

All ranks call everything together.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.data import Position
from evenstep.data.tree import tensors_in
from evenstep.errors import NonFiniteError, TaskError
from evenstep.events import Incident
from evenstep.internals import local_tensor
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written
from evenstep.tensors import named_parameters
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.update import Update


def bad_losses(losses: Mapping[int, tuple[str, Tensor]], group: Group) -> list[tuple[int, str, float]]:
    """Losses of all ranks that are inf or NaN: number of the micro-batch, task and loss; reads them from the device.

    >>> bad_losses({0: ("class", torch.tensor(1.0)), 1: ("box", torch.tensor(math.nan))}, Group())
    [(1, 'box', nan)]
    """
    mine = [(number, task, float(loss)) for number, (task, loss) in losses.items()]
    everybody = group.gather([one for one in mine if not math.isfinite(one[-1])])
    return sorted(one for theirs in everybody for one in theirs)


@final
@dataclass(slots=True)
class AbortCauses:
    """Explains aborted updates of an engine."""

    core: Update
    model: nn.Module
    execution: Execution
    context: TrainContext
    # the update that is tried again at lower and lower scales, and the state of the scale before its first attempt
    _overflowing: tuple[int, Position] | None = None
    _scale_before: dict[str, float | int] = field(default_factory=dict)

    def incident(self, pending: PendingUpdate) -> Incident:
        """The reason of an abort; the kind "overflow" has halved the loss scale for another attempt."""
        number, position, scale = pending.number, pending.batch.position, self.context.loss_scale
        has_weight = float(pending.total) != 0
        bad = bad_losses(pending.gathered.losses, self.execution.group) if has_weight else []
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        if bad:
            details["tasks"] = sorted({task for _, task, _ in bad if task})
            details["microbatches"] = [microbatch for microbatch, _, _ in bad]
        if self.context.precision.retries_overflow:
            details["loss_scale"] = scale.value
        where = f"update {number} (global batch {position.batch} of epoch {position.epoch}) was aborted"
        if not has_weight:
            kind = "no_weight"
            message = f"{where}: all weights are 0, or no loss depends on a parameter of the model."
        elif not bad and self._halves_scale(number, position):
            kind = "overflow"
            message = f"{where}: its gradient overflowed at a loss scale of {details['loss_scale']:g}."
        else:
            kind = "non_finite"
            message = f"{where}: its gradient is not finite"
            if bad:
                message += f"; {first_of([_described(*one) for one in bad], 3, '; ')}"
            elif self.context.precision.retries_overflow:
                message += f" even at a loss scale of {details['loss_scale']:g}"
            message += "."
        return Incident(kind=kind, update=number, message=message, details=details)

    def _halves_scale(self, number: int, position: Position) -> bool:
        """Halve the loss scale; at the floor, put back the scale from before the first attempt and give False."""
        scale = self.context.loss_scale
        if not self.context.precision.retries_overflow:
            return False
        if self._overflowing != (number, position):
            self._overflowing = number, position
            self._scale_before = scale.state_dict()
        if scale.halve():
            return True
        scale.load_state_dict(self._scale_before)
        self._overflowing = None
        return False

    def ending(self, incident: Incident, pending: PendingUpdate) -> tuple[Incident, Exception]:
        """The incident with all that could be found out, and the error of the run that ends with it.

        A TaskError if there was nothing to train on, else a NonFiniteError.
        """
        kept = f"The parameters are those after update {incident.update - 1}."
        if incident.kind == "no_weight":
            return incident, TaskError(
                f"{incident.message} The same held for the global batches before it; look at the data, and at "
                f"`weight` of the task. {kept}"
            )
        scale = self.context.loss_scale
        before = scale.value
        scale.value = scale.floor
        try:
            cause = diagnose(self.model, lambda: self.core.rerun(pending.batch, pending.number))
        finally:
            scale.value = before
        causes = self.execution.group.gather(cause)
        found = f"{incident.message} When it is run again, {min(causes, key=_specificity)}."
        self.context.storage.discard_from(incident.update)
        return replace(incident, message=found), NonFiniteError(
            f"{found} {kept} Look at this batch and at the loss, lower the learning rate or clip gradients, or let "
            f"such batches be skipped."
        )


def _specificity(cause: str) -> tuple[int, str]:
    kinds = ("the output of", "the gradients of")
    return next((place for place, words in enumerate(kinds) if words in cause), len(kinds)), cause


def _described(microbatch: int, task: str, loss: float) -> str:
    of_task = f"task `{task}`, " if task else ""
    return f"{of_task}micro-batch {microbatch}: its loss is {loss}"


def diagnose(model: nn.Module, rerun: Callable[[], object]) -> str:
    """Run `rerun` and name the first module whose output is inf or NaN, or else the parameters with such gradients.

    An output of -inf alone, as of a mask before a softmax, is the cause only if no later module removes it.

    Args:
        rerun: runs the forwards and backwards of the failed update, leaving gradients in `.grad`.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(float("nan"))
    >>> diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
    'the output of module `0` (Linear) is not finite'
    """
    cause = masked = ""  # the first such module; the first with -inf alone, while no later module has removed that

    def look_at_inputs(module: nn.Module, args: Any) -> None:
        nonlocal masked
        if _are_finite(args):
            masked = ""

    def look_at_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal cause, masked
        if cause:
            return
        place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if _are_finite(output):
            masked = ""
        elif not name or any(bool((one.isnan() | (one == torch.inf)).any()) for one in _floats_in(output)):
            cause = masked or place
        else:
            masked = masked or place

    handles = [one.register_forward_hook(partial(look_at_output, name)) for name, one in model.named_modules()]
    handles += [one.register_forward_pre_hook(look_at_inputs) for one in model.modules()]
    try:
        with as_written():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if cause or masked:
        return f"the output of {cause or masked} is not finite"
    values = {name: _values(one.grad) for name, one in named_parameters(model).items() if one.grad is not None}
    bad = [name for name, gradient in values.items() if not bool(gradient.isfinite().all())]
    if bad:
        return (
            f"all outputs are finite, but the gradients of {first_of(bad, 3)} are not: look at the loss, and train "
            f"under `torch.autograd.detect_anomaly()` to see the line"
        )
    norm = math.sqrt(math.fsum(float(one.abs().double().square().sum()) for one in map(Tensor.cpu, values.values())))
    if norm**2 > torch.finfo(torch.float32).max:
        return f"all numbers are finite, but the gradient's norm is {norm:.3g}: training has diverged"
    return "all numbers are finite: the model or its task computes differently each time"


def _values(gradient: Tensor) -> Tensor:
    return local_tensor(gradient.coalesce().values() if gradient.is_sparse else gradient)


def _floats_in(item: Any) -> list[Tensor]:
    tensors = [local_tensor(one) for one in tensors_in(item)]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


def _are_finite(item: Any) -> bool:
    return all(bool(one.isfinite().all()) for one in _floats_in(item))
