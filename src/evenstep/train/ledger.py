"""Counters of committed updates, the updates whose verdict the host has not read, and why one was aborted."""

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.data import GlobalBatch, Position
from evenstep.data.tree import tensors_in
from evenstep.errors import LostRankError, NonFiniteError, TaskError, clause
from evenstep.events import Bus, Incident, UpdateEvent
from evenstep.internals import children_of, local_tensor
from evenstep.pipeline.compiled import as_written
from evenstep.tensors import named_parameters
from evenstep.train.progress import Progress
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.outcome import Aborted, PendingUpdate, first_aborted
from evenstep.train.update.update import Update


@final
@dataclass(slots=True, kw_only=True)
class Ledger:
    """Counts updates as they are dispatched, and takes back those that were aborted.

    Attributes:
        progress: the counters after all dispatched updates.
    """

    core: Update
    execution: Execution
    context: TrainContext
    progress: Progress = field(default_factory=Progress)
    _pending: list[PendingUpdate] = field(default_factory=list[PendingUpdate])
    # the batch that is tried again at lower and lower scales, and the state of the scale before its first attempt
    _overflow: tuple[Position, dict[str, float | int]] | None = None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, pending: PendingUpdate) -> PendingUpdate:
        """Count a dispatched update."""
        self._pending.append(pending)
        self.progress = pending.before.committed(pending.batch, skipped_samples=pending.skipped_samples)
        self.context.loss_scale.committed()
        return pending

    def settle(self) -> Aborted | None:
        """Read the verdicts of all dispatched updates; gives the first that was aborted.

        After an abort the counters are those before it, and updates that were dispatched since were not applied.
        """
        updates, index = self._take()
        self.core.settle(None if index is None else updates[index].number)
        if index is None:
            return None
        first = updates[index]
        self.context.storage.discard_from(first.number)
        self._go_back_before(first)
        self.core.resume()
        since = tuple(one.batch for one in updates[index + 1 :])
        return Aborted(incident=self._incident(first), pending=first, since=since)

    def events(self, bus: Bus, batch: GlobalBatch) -> AbstractContextManager[None]:
        """Events around the next update."""
        number, samples = self.progress.update + 1, self.progress.samples
        begin = UpdateEvent(update=number, num_microbatches=batch.num_microbatches)

        def end(error: BaseException | None) -> UpdateEvent:
            committed = error is None and self.progress.update >= number
            taken = self.progress.samples - samples if committed else batch.num_samples
            return replace(begin, committed=committed, num_samples=taken)

        return bus.span("update", lambda: begin, end)

    def skip(self, batch: GlobalBatch) -> None:
        """Count `batch` as taken without an update."""
        self.progress = self.progress.without(batch)

    def begin(self) -> None:
        """Before a pass over the data: nothing is pending, and buffers are as they are now."""
        self.core.require_whole()
        self._pending.clear()
        self.core.rollback.buffers.restore(0.0)

    def abandon(self) -> None:
        """Roll back uncommitted updates after an error."""
        updates, index = self._take()
        if index is not None:
            self._go_back_before(updates[index])
        self.core.abandon(None if index is None else updates[index].number)
        self.context.storage.discard_from(self.progress.update + 1)

    @contextmanager
    def together(self) -> Generator[None]:
        """Around what all ranks do together: an error inside is rolled back, and ends the other ranks' waiting."""
        world = self.execution.world
        world.go_on()
        try:
            yield
        except BaseException as raised:
            error = world.explained(raised)
            if not isinstance(error, LostRankError):
                world.fail(clause(error))
            self.abandon()
            if error is raised:
                raise
            raise error from raised

    def explain(self, aborted: Aborted) -> tuple[Incident, Exception]:
        """The incident with all that another run finds out, and an error to raise; see `Engine.explain`."""
        incident, pending = aborted.incident, aborted.pending
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
            cause = diagnose(self.core.model, lambda: self.core.rerun(pending.batch, pending.number))
        finally:
            scale.value = before
        _, cause = min(self.execution.group.gather(cause))
        self.context.storage.discard_from(incident.update)
        found = f"{incident.message} When it is run again, {cause}."
        return replace(incident, message=found), NonFiniteError(
            f"{found} {kept} Look at this batch and at the loss, lower the learning rate or clip gradients, or let "
            f"such batches be skipped."
        )

    def _incident(self, pending: PendingUpdate) -> Incident:
        """The reason of an abort; the kind "overflow" has halved the loss scale for another attempt."""
        position, scale = pending.batch.position, self.context.loss_scale
        has_scale = self.context.precision.retries_overflow
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        kind = "non_finite"
        why = "its gradient is not finite"
        if has_scale:
            details["loss_scale"] = scale.value
            why += f" at a loss scale of {scale.value:g}"
        if float(pending.total) == 0:
            kind = "no_weight"
            why = "all weights are 0, or no loss depends on a parameter of the model"
        elif bad := self._bad_losses(pending):
            details["tasks"] = sorted({task for _, task, _ in bad if task})
            details["microbatches"] = [microbatch for microbatch, _, _ in bad]
            why += f"; the loss of micro-batch {first_of([microbatch for microbatch, _, _ in bad], 3)} is inf or NaN"
        elif has_scale and self._halves_scale(pending):
            kind = "overflow"
        where = f"update {pending.number} (global batch {position.batch} of epoch {position.epoch})"
        message = f"{where} was aborted: {why}."
        return Incident(kind=kind, update=pending.number, message=message, details=details)

    def _halves_scale(self, pending: PendingUpdate) -> bool:
        """Halve the loss scale; at the floor, put it back as before the first attempt, and give False."""
        scale, place = self.context.loss_scale, pending.batch.position
        if self._overflow is None or self._overflow[0] != place:
            self._overflow = place, scale.state_dict()
        if scale.halve():
            return True
        scale.load_state_dict(self._overflow[1])
        self._overflow = None
        return False

    def _bad_losses(self, pending: PendingUpdate) -> list[tuple[int, str, float]]:
        """Losses of all ranks that are inf or NaN: number of the micro-batch, task and loss."""
        mine = [(number, task, float(loss)) for number, (task, loss) in pending.losses.items()]
        everybody = self.execution.group.gather([one for one in mine if not math.isfinite(one[-1])])
        return sorted(one for theirs in everybody for one in theirs)

    def _take(self) -> tuple[list[PendingUpdate], int | None]:
        updates = self._pending.copy()
        self._pending.clear()
        return updates, first_aborted(updates)

    def _go_back_before(self, update: PendingUpdate) -> None:
        self.progress = update.before
        self.context.loss_scale.load_state_dict(update.loss_scale)
        self.core.learning_rates.restore(update.rates)


def diagnose(model: nn.Module, rerun: Callable[[], object]) -> tuple[int, str]:
    """Run `rerun` and name the first module whose output is inf or NaN, or else the parameters with such gradients.

    An output of -inf alone, as of a mask before a softmax, is the cause only if no later module removes it.

    Args:
        rerun: runs the forwards and backwards of the failed update, leaving gradients in `.grad`.

    Returns:
        A number that is lower the more exact the cause is, and the cause.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(float("nan"))
    >>> diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
    (0, 'the output of module `0` (Linear) is not finite')
    """
    cause = masked = ""  # the first such module; the first with -inf alone, while no later module has removed that

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal cause, masked
        if cause:
            return
        is_layer = not children_of(module)
        place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if _are_finite(output) or (is_layer and _are_finite(args)):
            masked = ""
        if _are_finite(output):
            return
        if not name or any(bool((one.isnan() | (one == torch.inf)).any()) for one in _floats_in(output)):
            cause = masked or place
        else:
            masked = masked or place

    handles = [one.register_forward_hook(partial(look, name)) for name, one in model.named_modules()]
    try:
        with as_written():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if cause or masked:
        return 0, f"the output of {cause or masked} is not finite"
    grads = {name: one.grad for name, one in named_parameters(model).items() if one.grad is not None}
    bad = [name for name, one in grads.items() if not _are_finite(one.coalesce().values() if one.is_sparse else one)]
    if bad:
        return 1, (
            f"all outputs are finite, but the gradients of {first_of(bad, 3)} are not: look at the loss, and train "
            f"under `torch.autograd.detect_anomaly()` to see the line"
        )
    return 2, (
        "all numbers are finite: the norm of the gradient is too large for its format, as training has diverged, or "
        "the model or its task computes differently each time"
    )


def _floats_in(item: Any) -> list[Tensor]:
    tensors = [local_tensor(one) for one in tensors_in(item)]
    return [one for one in tensors if one.is_floating_point() or one.is_complex()]


def _are_finite(item: Any) -> bool:
    return all(bool(one.isfinite().all()) for one in _floats_in(item))
