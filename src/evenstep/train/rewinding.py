"""Which checkpoint a run goes back to within itself, and what then no longer counts.

A rewind is a resume in place: the same reading, from a checkpoint before the offending update. Checkpoints of the
course that was given up are deleted, or a later resume would take them for the newest. Loading is the trainer's.
"""

from collections.abc import Callable
from pathlib import Path

from evenstep.checkpoint import complete_checkpoints, read_checkpoint, remove_checkpoint
from evenstep.errors import CheckpointError
from evenstep.events import Incident


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
