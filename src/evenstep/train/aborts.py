"""Causes of aborted updates: kind of incident, micro-batches, module, and the error if the run ends.

Losses that are inf or NaN are known. Where there are none, the update is computed again with the same randomness and
parameters: at the lowest loss scale, and, before the run ends, with a look at the output of each module. Gradients that
are not finite behind finite outputs are left to `torch.autograd.detect_anomaly`. All ranks call everything together.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
    _overflowing: tuple[int, Position] | None = None  # the update that is tried again at lower and lower scales
    _scale_before: dict[str, float | int] = field(default_factory=dict)

    def incident(self, pending: PendingUpdate) -> Incident:
        number, position, scale = pending.number, pending.batch.position, self.context.loss_scale
        retries_overflow = self.context.precision.retries_overflow
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        where = f"update {number} (global batch {position.batch} of epoch {position.epoch}) was aborted"
        overflowed, bad = self._causes(pending)
        if bad:
            details["tasks"] = sorted({one.task for one in bad if one.task})
            details["microbatches"] = [one.microbatch for one in bad]
        if retries_overflow:
            details["loss_scale"] = scale.value
        if float(pending.total) == 0:
            kind = "no_weight"
            message = f"{where}: all weights are 0, or no loss depends on a parameter of the model."
        elif overflowed:
            kind = "overflow"
            message = f"{where}: its gradient overflowed at a loss scale of {scale.value:g}."
        else:
            kind = "non_finite"
            message = f"{where}: its gradient is not finite"
            if retries_overflow:
                message += f", at a loss scale of {scale.value:g} or any other down to the `floor` of {scale.floor:g}"
            message += f"; {first_of(bad, 3, '; ')}." if bad else "."
        return Incident(kind=kind, update=number, message=message, details=details)

    def _causes(self, pending: PendingUpdate) -> tuple[bool, list[BadLoss]]:
        if float(pending.total) == 0:
            return False, []
        place = pending.number, pending.batch.position
        if self._overflowing == place:
            return True, []
        self._overflowing = None
        bad = bad_losses(pending.gathered, self.execution.group)
        if bad or not self.context.precision.retries_overflow:
            return False, bad
        with self._at_lowest_scale():
            self.core.rerun(pending.batch, pending.number)
            overflowed = self.core.has_finite_gradient()
        self.context.storage.discard_from(pending.number)
        if overflowed:
            self._overflowing = place
            self._scale_before = self.context.loss_scale.state_dict()
        return overflowed, []

    @contextmanager
    def _at_lowest_scale(self) -> Generator[None]:
        scale = self.context.loss_scale
        before = scale.value
        scale.value = scale.floor
        try:
            yield
        finally:
            scale.value = before

    def lower_scale(self) -> None:
        """Let an update that overflowed be tried again.

        Raises:
            NonFiniteError: there is no lower scale. It is the one from before the update again.
        """
        try:
            self.context.loss_scale.overflowed()
        except NonFiniteError:
            self.context.loss_scale.load_state_dict(self._scale_before)
            raise

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
        with self._at_lowest_scale():
            cause = diagnose(self.model, lambda: self.core.rerun(pending.batch, pending.number))
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
