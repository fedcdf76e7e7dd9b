"""Why an update was not applied: which kind of incident it is, who is to blame, and the error if the run ends for it.

All ranks ask together and come to the same. What is done about it is the policy's to say and the loop's to do.
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from torch import nn

from evenstep.errors import NonFiniteError, TaskError
from evenstep.events import Incident, Storage
from evenstep.precision import Precision
from evenstep.train.blame import Blamed, blame
from evenstep.train.diagnose import diagnose
from evenstep.train.execution import Execution
from evenstep.train.failures import FailurePolicy, Retry, Skip
from evenstep.train.ledger import Entry
from evenstep.train.update import Update


@final
@dataclass(slots=True, kw_only=True)
class Aborts:
    """Explains aborted updates.

    Args:
        update: that executed them, and can run one again.
        model: what it trains.
        execution: on which ranks.
        precision: whose loss scale may have been too high.
        storage: from which metrics are removed that looking for the cause has put.
        on_non_finite: the policy for gradients that are inf or NaN.
    """

    update: Update
    model: nn.Module
    execution: Execution
    precision: Precision
    storage: Storage
    on_non_finite: FailurePolicy
    _on_no_weight: FailurePolicy = field(default_factory=lambda: Skip(limit=100))

    def incident(self, entry: Entry, number: int) -> tuple[Incident, FailurePolicy]:
        """Why update `number` was aborted, and the policy that answers it; all ranks ask together."""
        position = entry.batch.position
        details: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        where = f"update {number} (global batch {position.batch} of epoch {position.epoch})"
        blamed = self._blamed(entry, number)
        if blamed:
            details["tasks"] = sorted({one.task for one in blamed if one.task})
            details["microbatches"] = [one.microbatch for one in blamed if one.microbatch >= 0]
        if float(entry.outcome.total) == 0:
            kind, policy = "no_weight", self._on_no_weight
            message = (
                f"{where} was aborted: the weights of all its micro-batches are 0, or no task gave a loss (did `loss` "
                f"forget to return it?)."
            )
        elif any(one.raised for one in blamed):
            kind, policy = "task_error", self.on_non_finite
            message = f"{where} was aborted: a task failed"
        elif self.precision.retries_overflow and not (blamed and self.on_non_finite.tolerates_errors):
            kind, policy = "overflow", Retry()
            details["loss_scale"] = self.precision.scale
            message = f"{where} was aborted: its gradient overflowed at a loss scale of {self.precision.scale:g}."
        else:
            kind, policy = "non_finite", self.on_non_finite
            message = f"{where} was aborted: its gradient is not finite"
        if kind in ("task_error", "non_finite"):
            more = f" and {len(blamed) - 3} more" if len(blamed) > 3 else ""
            message += f"; {'; '.join(map(str, blamed[:3]))}{more}." if blamed else "."
        return Incident(kind=kind, update=number, message=message, details=details), policy

    def _blamed(self, entry: Entry, number: int) -> list[Blamed]:
        """Who is to blame for an abort; an overflow is the loss scale's fault, unless a policy asks about tasks."""
        if float(entry.outcome.total) == 0:
            return []
        if not self.precision.retries_overflow:
            blamed = self.update.blame(entry.batch, entry.outcome.gathered, number)
            self.storage.discard_from(number)  # looking for it may have put metrics again
            return blamed
        return blame(entry.outcome.gathered, self.execution.group) if self.on_non_finite.tolerates_errors else []

    def stop(self, incident: Incident, entry: Entry) -> NoReturn:
        """End the run with an error that says what to do.

        Raises:
            TaskError: there was nothing to train on, or a task failed.
            NonFiniteError: the gradient was not finite.
        """
        kept = f"The parameters are those after update {incident.update - 1}."
        if incident.kind == "no_weight":
            raise TaskError(
                f"{incident.message} The same held for the global batches before it; look at the data, and at "
                f"`weight` of the task. {kept}"
            )
        for _, error in entry.outcome.gathered.failures.values():
            error.add_note(f"{incident.message} {kept}")
            raise error
        if incident.kind == "task_error":
            raise TaskError(f"{incident.message} {kept}")
        with self.execution.strategy.uncompressed() as advice:
            cause = diagnose(self.model, lambda: self.update.rerun(entry.batch, incident.update), if_finite=advice)
        self.storage.discard_from(incident.update)
        raise NonFiniteError(
            f"{incident.message} When it is run again, {cause}. {kept} Look at this batch and at the loss, lower the "
            f"learning rate or clip gradients, or let such batches be skipped."
        )
