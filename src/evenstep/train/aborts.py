"""Causes of aborted updates: kind of incident, micro-batches, module, and the error if the run ends.

All ranks call everything together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.data import Position
from evenstep.data.tree import tensors_in
from evenstep.errors import NonFiniteError, TaskError
from evenstep.events import Incident
from evenstep.internals import local_tensor
from evenstep.optim.apply import norms
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written
from evenstep.tensors import named_parameters
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.update import Update


class BadLoss(NamedTuple):
    """A micro-batch whose loss is inf or NaN."""

    microbatch: int
    task: str
    loss: float

    def __str__(self) -> str:
        task = f"task `{self.task}`, " if self.task else ""
        return f"{task}micro-batch {self.microbatch}: its loss is {self.loss}"


def bad_losses(gathered: MicrobatchResults, group: Group) -> list[BadLoss]:
    """Losses of all ranks that are inf or NaN, by micro-batch; reads the losses from the device.

    >>> losses = {0: ("class", torch.tensor(1.0)), 1: ("box", torch.tensor(math.nan))}
    >>> print(*bad_losses(MicrobatchResults(losses=losses), Group()))
    task `box`, micro-batch 1: its loss is nan
    """
    mine = [BadLoss(number, task, float(loss)) for number, (task, loss) in gathered.losses.items()]
    bad = [one for one in mine if not math.isfinite(one.loss)]
    return sorted(one for theirs in group.gather(bad) for one in theirs)


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
        bad = bad_losses(pending.gathered, self.execution.group) if has_weight else []
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        if bad:
            details["tasks"] = sorted({one.task for one in bad if one.task})
            details["microbatches"] = [one.microbatch for one in bad]
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
                message += f"; {first_of(bad, 3, '; ')}"
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
    watch = _Watch()
    handles = [module.register_forward_hook(partial(watch, name)) for name, module in model.named_modules()]
    handles += [module.register_forward_pre_hook(watch.look_at_inputs) for module in model.modules()]
    try:
        with as_written():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if watch.cause or watch.masked:
        return f"the output of {watch.cause or watch.masked} is not finite"
    gradients = {name: one.grad for name, one in named_parameters(model).items() if one.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(_values(gradient).isfinite().all())]
    if bad:
        return (
            f"all outputs are finite, but the gradients of {first_of(bad, 3)} are not: look at the loss, and train "
            f"under `torch.autograd.detect_anomaly()` to see the line"
        )
    squared = sum(_norm(gradient) ** 2 for gradient in gradients.values())
    if squared > torch.finfo(torch.float32).max:
        return f"all numbers are finite, but the gradient's norm is {math.sqrt(squared):.3g}: training has diverged"
    return "all numbers are finite: the model or its task computes differently each time"


class _Watch:
    """Forward hook that looks for the first module whose output is not finite.

    Attributes:
        cause: the module, in words; "" while none is known.
        masked: the first module whose output has -inf alone, which no later module has removed.
    """

    def __init__(self) -> None:
        self.cause = ""
        self.masked = ""

    def look_at_inputs(self, module: nn.Module, args: Any) -> None:
        """A module that gets finite numbers shows that -inf before it was removed."""
        if all(bool(one.isfinite().all()) for one in _floats_in(args)):
            self.masked = ""

    def __call__(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.cause:
            return
        values = _floats_in(output)
        place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if all(bool(one.isfinite().all()) for one in values):
            self.masked = ""
        elif any(bool((one.isnan() | (one == torch.inf)).any()) for one in values) or not name:
            self.cause = self.masked or place
        else:
            self.masked = self.masked or place


def _values(gradient: Tensor) -> Tensor:
    return local_tensor(gradient.coalesce().values() if gradient.is_sparse else gradient)


def _norm(gradient: Tensor) -> float:
    values = _values(gradient)
    return float(norms([values], torch.float64 if values.device.type != "mps" else torch.float32))


def _floats_in(item: Any) -> list[Tensor]:
    tensors = [local_tensor(one) for one in tensors_in(item)]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]
