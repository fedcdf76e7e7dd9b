"""The checkpoints of a run and its state, together: to save it, and to go back to one within a run.

To go back is a resume in place: the same reading, from a checkpoint before the offending update. Checkpoints of the
course that was given up are deleted, or a later resume would take them for the newest. When to save and when to go back
is the loop's to say; how a checkpoint gets to the disk is told in `saving`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.checkpoint import complete_checkpoints, read_checkpoint, remove_checkpoint
from evenstep.errors import CheckpointError
from evenstep.events import Incident
from evenstep.train.reporter import Reporter
from evenstep.train.run_state import RunState
from evenstep.train.saving import Saving
from evenstep.train.state import Tree


@final
@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores the state of a run.

    Args:
        state: of the run.
        saving: the run folder's checkpoints; there is a folder wherever a policy may go back.
        reporter: told of incidents.
    """

    state: RunState
    saving: Saving
    reporter: Reporter
    _last: tuple[int, int] | None = None  # the update of the last fault, and where the run went back to

    def poll(self) -> None:
        """Take note of a save that goes on in the background."""
        self.saving.poll(self.state.engine.progress.update, self._held)

    def begin(self, *, must: bool = False) -> None:
        """Begin to save the state as of now; metrics must have been written.

        Args:
            must: whether a disk that fails is an error, also where saves are asynchronous.
        """
        self.saving.begin(self.state.engine.progress.update, self._held, must=must)

    def save(self) -> Path:
        """Write a checkpoint of the state as of now; gives its folder once it is published."""
        self.begin(must=True)
        self.saving.finish()
        return self.saving.path_of(self.state.engine.progress.update)

    def load(self, state: Tree) -> None:
        """Go on from what `RunState.state_dict` gave; says in what the run differs from the one that was saved."""
        changed = self.state.load_state_dict(state)
        self.reporter.changed(changed, self.state.engine.progress.update)

    def resume(self, path: Path) -> Path:
        """Go on from the checkpoint in `path`; gives its folder."""
        folder, changed = self.state.load_checkpoint(path)
        self.reporter.changed(changed, self.state.engine.progress.update)
        self.saving.resumed(self.state.engine.progress.update, folder)
        return folder

    def go_back(self, update: int) -> None:
        """Go back, in place, to the newest checkpoint of fewer than `update` updates.

        Raises:
            CheckpointError: there is none.
        """
        engine, folder = self.state.engine, self.saving.folder
        assert folder is not None, "checked when built"
        limit = engine.parts.cuts.limit  # what did not fit then would not fit now
        # Where going back did not help, the checkpoint itself may be spoiled: the next time goes further.
        helped = self._last is None or update > self._last[0]
        before = update if self._last is None or helped else self._last[1]
        self.saving.settle()
        path = engine.group.first_rank_does(lambda: newest_before(folder, before, self.reporter.report))
        self.resume(path)
        now = engine.progress.update
        engine.parts.cuts.limit = limit
        self._last = update, now
        self.reporter.writers.rewind(now)
        engine.group.first_rank_does(lambda: forget_after(folder, now))
        message = f"the run went back to {path.name}, since update {update} must not have happened."
        self.reporter.report(Incident(kind="rewind", update=now, message=message))

    def _held(self) -> Tree:
        """The state for a checkpoint, in which each rank writes its part of tensors that are cut over ranks."""
        return self.state.state_dict(whole=False)


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
