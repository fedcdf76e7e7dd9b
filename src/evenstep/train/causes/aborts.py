"""Why an update was not applied: which kind of incident it is, who is to blame, and the error if the run ends for it.

It looks at what the ranks kept of their micro-batches, losses that are inf or NaN, and
computes the update again where that does not tell. All ranks ask together and come to the same. What is done about it
is told in `policies`, and the loop does it.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import nn

from evenstep.arguments import first_of
from evenstep.data import Position
from evenstep.errors import NonFiniteError, TaskError
from evenstep.events import Incident
from evenstep.internals import unwrapped
from evenstep.parallel import Group
from evenstep.train.causes.diagnose import diagnose, gradient_norms
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.update import Update


@final
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FailureCause:
    """What made an update fail, and in which micro-batch.

    Args:
        microbatch: its number; -1 where the whole task is meant.
        task: its name; "" of a run with one task without a name.
    """

    microbatch: int
    task: str
    why: str

    def __str__(self) -> str:
        task = f"task `{self.task}`" if self.task else ""
        place = f"micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"{', '.join(filter(None, (task, place)))}: {self.why}"


def find_causes(gathered: MicrobatchResults, group: Group) -> list[FailureCause]:
    """Those of all ranks, by micro-batch; it reads the losses from the device.

    >>> import torch
    >>> losses = {0: ("class", torch.tensor(1.0)), 1: ("box", torch.tensor(math.nan))}
    >>> print(*find_causes(MicrobatchResults(losses=losses), Group()))
    task `box`, micro-batch 1: its loss is nan
    """
    mine: list[FailureCause] = []
    for index, (task, loss) in gathered.losses.items():
        value = float(loss)
        if not math.isfinite(value):
            mine.append(FailureCause(microbatch=index, task=task, why=f"its loss is {value}"))
    return sorted(one for theirs in group.gather(mine) for one in theirs)


@final
@dataclass(slots=True)
class AbortCauses:
    """Explains aborted updates.

    Args:
        context: the precision, whose loss scale may have been too high, and the metrics, from which is removed what
            looking for the cause has put.
    """

    core: Update
    model: nn.Module
    execution: Execution
    context: TrainContext
    _overflowing: tuple[int, Position] | None = None  # the update that is tried again at lower and lower scales
    _scale_before: dict[str, float | int | None] = field(default_factory=dict)

    def incident(self, pending: PendingUpdate) -> Incident:
        number, position, scale = pending.number, pending.batch.position, self.context.loss_scale
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        where = f"update {number} (global batch {position.batch} of epoch {position.epoch})"
        retries_overflow = self.context.precision.retries_overflow
        overflowed, causes = self._looked_into(pending)
        if causes:
            details["tasks"] = sorted({one.task for one in causes if one.task})
            details["microbatches"] = [one.microbatch for one in causes if one.microbatch >= 0]
        if retries_overflow:
            details["loss_scale"] = scale.value
        if float(pending.total) == 0:
            kind = "no_weight"
            message = (
                f"{where} was aborted: the weights of all its micro-batches are 0, or no task gave a loss, or only "
                f"losses that no parameter of the model moves (made anew, as by `torch.tensor(…)`, or by another?)."
            )
        elif overflowed:
            kind = "overflow"
            message = f"{where} was aborted: its gradient overflowed at a loss scale of {scale.value:g}."
        else:
            kind = "non_finite"
            message = f"{where} was aborted: its gradient is not finite"
            if retries_overflow:
                message += f", at a loss scale of {scale.value:g} or any other down to the `floor` of {scale.floor:g}"
        if kind == "non_finite":
            message += f"; {first_of(causes, 3, '; ')}." if causes else "."
        return Incident(kind=kind, update=number, message=message, details=details)

    def _looked_into(self, pending: PendingUpdate) -> tuple[bool, list[FailureCause]]:
        if float(pending.total) == 0:
            return False, []
        number, batch = pending.number, pending.batch
        place = number, batch.position
        if self._overflowing == place:
            return True, []
        self._overflowing = None
        causes = find_causes(pending.gathered, self.execution.group)
        if causes:
            return False, causes
        with self._at_lowest_scale():
            overflowed = self.context.precision.retries_overflow and self._is_finite(pending)
        self.context.storage.discard_from(number)  # looking for it may have put metrics again
        if overflowed:
            self._overflowing, self._scale_before = place, self.context.loss_scale.state_dict()
        return overflowed, causes

    @contextmanager
    def _at_lowest_scale(self) -> Generator[None]:
        scale = self.context.loss_scale
        before = scale.value
        scale.value = scale.floor
        try:
            yield
        finally:
            scale.value = before

    def _is_finite(self, pending: PendingUpdate) -> bool:
        self.core.rerun(pending.batch, pending.number)
        return self.core.has_finite_gradient()

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
        """With what the run ends: the incident with all that could be found out, and an error that says what to do.

        A TaskError if there was nothing to train on, else a NonFiniteError.
        """
        kept = f"The parameters are those after update {incident.update - 1}."
        if incident.kind == "no_weight":
            return incident, TaskError(
                f"{incident.message} The same held for the global batches before it; look at the data, and at "
                f"`weight` of the task. {kept}"
            )
        cause = self._cause(pending)
        found = f"{incident.message} When it is run again, {cause}."
        norms = gradient_norms(unwrapped(self.model), self.execution.group)
        self.context.storage.discard_from(incident.update)
        return replace(incident, message=found, details={**incident.details, "grad_norms": norms}), NonFiniteError(
            f"{found} {kept} Look at this batch and at the loss, lower the "
            f"learning rate or clip gradients, or let such batches be skipped."
        )

    def _cause(self, pending: PendingUpdate) -> str:
        with self._at_lowest_scale():
            cause = diagnose(self.model, lambda: self.core.rerun(pending.batch, pending.number))
        causes = self.execution.group.gather(cause)
        return next(iter(sorted(set(causes), key=_vagueness)))


def _vagueness(cause: str) -> tuple[int, str]:
    return next((n for n, words in enumerate(("the output of", "the gradients of")) if words in cause), 2), cause
