"""What is done about updates that were aborted and about spikes of the loss: the policies of a run, in one place.

Each method returns a decision, the same on all ranks; the loop carries it out. It changes nothing of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from evenstep.errors import NonFiniteError
from evenstep.events import Incident, Record, Storage
from evenstep.train.failures import Answer, FailurePolicy, Retry, Rewind, Skip
from evenstep.train.failures.spikes import LOSS, LossSpikes

_MAX_BATCHES_WITHOUT_WEIGHT = 100


class Decision(NamedTuple):
    """What is done, and about what.

    Args:
        answer: None: it is only reported.
        incident: with what the policy says about its answer.
    """

    answer: Answer | None
    incident: Incident


@final
@dataclass(slots=True, kw_only=True)
class Policies:
    """The policies of a run.

    Args:
        non_finite: for gradients that are inf or NaN, and for tasks that fail.
        out_of_memory: for a micro-batch that does not fit; by default it is cut finer as long as that helps.
        spikes: looks for losses far above those before; None does not look.
    """

    non_finite: FailurePolicy
    out_of_memory: FailurePolicy = field(default_factory=Retry)
    spikes: LossSpikes | None = None
    _on_no_weight: FailurePolicy = field(default_factory=lambda: Skip(limit=_MAX_BATCHES_WITHOUT_WEIGHT))

    @property
    def may_rewind(self) -> bool:
        return any(isinstance(policy, Rewind) for policy in (self.non_finite, self.spikes and self.spikes.policy))

    def about_abort(self, incident: Incident) -> Decision:
        if incident.kind == "overflow":
            return Decision(Retry()(incident), incident)
        policy = self._on_no_weight if incident.kind == "no_weight" else self.non_finite
        answer = policy(incident)
        if policy.note:
            incident = replace(incident, message=f"{incident.message} {policy.note}")
        return Decision(answer, incident)

    def about_spikes(self, records: Sequence[Record], storage: Storage) -> Decision | None:
        spikes = self.spikes
        if spikes is None:
            return None
        losses = [record for record in records if record.name == LOSS]
        if not losses:
            return None
        before = storage.values_before(losses[0].update, LOSS, spikes.window_updates)
        incident = spikes.first(before, losses)
        if incident is None:
            return None
        return Decision(None if spikes.policy is None else spikes.policy(incident), incident)

    def went_back(self) -> None:
        """The run has gone back to before a spike."""
        if self.spikes is not None:
            self.spikes.forget()


def spike_error(incident: Incident, update: int) -> NonFiniteError:
    """With what a run ends that stops for a spike of the loss after `update` committed updates."""
    return NonFiniteError(
        f"{incident.message} The parameters are those after update {update}; go on from a "
        f"checkpoint before the spike with a lower learning rate or clipped gradients, or let "
        f"`failures.loss_spike` be rewind_past, which leaves the data that caused it out."
    )
