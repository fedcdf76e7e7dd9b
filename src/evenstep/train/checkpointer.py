"""Goes back within a run: when a loss is a reason to, to which checkpoint, and what then no longer counts.

A rewind is a resume in place: the same reading, from a checkpoint before the offending update. Checkpoints of the
course that was given up are deleted, or a later resume would take them for the newest. What a spike of the loss is, is
told in `spikes`; which data are taken again is the loop's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.checkpoint import complete_checkpoints, read_checkpoint, remove_checkpoint
from evenstep.errors import CheckpointError, NonFiniteError
from evenstep.events import Incident, Record, Writers
from evenstep.train.cuts import Cuts
from evenstep.train.failures import Answer
from evenstep.train.loop import Loop
from evenstep.train.saving import Saving
from evenstep.train.spikes import LOSS, LossSpikes


@final
@dataclass(slots=True, kw_only=True)
class Rewinding:
    """Goes back for a trainer.

    Args:
        loop: that is rewound, with the losses so far.
        load: restores the state of a checkpoint.
        saving: whose checkpoints are gone back to; it has a folder wherever a policy may rewind.
        writers: that must forget the course that was given up.
        cuts: of this rank.
        spikes: looks for losses far above those before, or None.
        report: tells hooks and writers of an incident.
    """

    loop: Loop
    load: Callable[[Path], Path]
    saving: Saving
    writers: Writers
    cuts: Cuts
    spikes: LossSpikes | None
    report: Callable[[Incident], None]
    _last: tuple[int, int] | None = None  # the update of the last rewind's fault, and where it went back to

    def to_before(self, update: int) -> None:
        """Go back, in place, to the newest checkpoint of fewer than `update` updates.

        Raises:
            CheckpointError: there is none.
        """
        group, folder = self.loop.execution.group, self.saving.folder
        assert folder is not None, "checked when built"
        cut = self.cuts.limit  # what did not fit then would not fit now
        # Where going back did not help, the checkpoint itself may be spoiled: the next time goes further.
        helped = self._last is None or update > self._last[0]
        before = update if self._last is None or helped else self._last[1]
        self.saving.settle()
        path = group.first_rank_does(lambda: newest_before(folder, before, self.report))
        self.load(path)
        now = self.loop.progress.update
        self.saving.resumed(now, path)
        self.cuts.limit = cut
        self._last = update, now
        self.writers.rewind(now)
        group.first_rank_does(lambda: forget_after(folder, now))
        if self.spikes is not None:
            self.spikes.forget()
        message = f"the run went back to {path.name}, since update {update} must not have happened."
        self.report(Incident(kind="rewind", update=now, message=message))

    def look_for_spikes(self, records: Sequence[Record]) -> None:
        """Do what the policy says about a loss among `records`, the last to be settled, that is a spike.

        Raises:
            NonFiniteError: the policy says to stop.
        """
        spikes = self.spikes
        if spikes is None:
            return
        losses = [record for record in records if record.name == LOSS]
        window = self.loop.storage.last(LOSS, spikes.window_updates + len(losses))
        before = [record for record in window if not losses or record.update < losses[0].update]
        incident = spikes.first(before, losses)
        if incident is None:
            return
        answer = None if spikes.policy is None else spikes.policy(incident)
        self.report(incident)
        if answer is Answer.STOP:
            raise NonFiniteError(
                f"{incident.message} The parameters are those after update {self.loop.progress.update}; go on from a "
                f"checkpoint before the spike with a lower learning rate or clipped gradients, or let "
                f"`failures.loss_spike` be rewind_past, which leaves the data that caused it out."
            )
        if answer in (Answer.REWIND, Answer.REWIND_PAST):
            self.loop.rewind(incident, answer)


def newest_before(folder: Path, update: int, report: Callable[[Incident], None]) -> Path:
    """The newest sound checkpoint of fewer than `update` updates in the run folder `folder`.

    Raises:
        CheckpointError: there is none.
    """
    for path in reversed(complete_checkpoints(folder / "checkpoints")):
        if _update_of(path) < update:
            try:
                return read_checkpoint(path).path
            except CheckpointError as error:
                message = f"{path.name} was passed over: {error}"
                report(Incident(kind="checkpoint", update=update, message=message, rank=0))
    raise CheckpointError(
        f"the run must go back to before update {update}, but `{folder}` holds no sound checkpoint of that time; save "
        f"more often, or keep more."
    )


def forget_after(folder: Path, update: int) -> None:
    """Delete the checkpoints of more than `update` updates."""
    for path in complete_checkpoints(folder / "checkpoints"):
        if _update_of(path) > update:
            remove_checkpoint(path)


def _update_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
