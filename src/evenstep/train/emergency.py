"""End of a run by an error: tells the other ranks, saves the last committed update, and reports the error.

It never hides the error that is in flight, and it cannot go on from it: that is a resume's, or a policy's.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.checkpoint import Mirror, write_emergency, write_part
from evenstep.errors import CheckpointError, LostRankError, ReplicaError, clause
from evenstep.events import Incident
from evenstep.parallel.group import Interrupted
from evenstep.train.checkpointing.checkpointer import Checkpointer
from evenstep.train.reporter import failed

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


def emergency_save(error: BaseException, loop: "Loop", *, end: Callable[[BaseException], None]) -> None:
    """Go back to the last committed update, save it and write its metrics.

    Args:
        end: tells writers of the end.
    """
    engine = loop.engine
    try:
        if not isinstance(error, LostRankError) or isinstance(error, Interrupted):  # which another rank waits for
            engine.group.fail(clause(error))
        is_whole = engine.is_whole
        unread = _abandon(error, loop)
        lacking = "" if is_whole and engine.core.is_whole else "the error came while the state was changed"
        with ExitStack() as after:  # each is done, whatever hooks and screens raise when they are told
            after.callback(end, error)
            if loop.checkpointer.enabled:
                after.callback(_save, error, loop, lacking=unread or lacking)
            if engine.group.ranks == 1 and not unread:  # the others may not be there to sum with
                after.callback(loop.write_known)  # first, so that what is saved counts what is written
            loop.reporter.report(failed(error, engine.group, engine.progress.update))
    except Exception as second:  # noqa: BLE001 - nothing is lost: it is attached to the error in flight
        error.add_note(f"Then writing the last metrics raised {type(second).__name__}: {second}")


def _abandon(error: BaseException, loop: "Loop") -> str:
    try:
        loop.abandon()
    except RuntimeError as second:
        first, _, _ = str(second).partition("\n")
        why = f"what the device holds can't be read any more ({clause(first)})"
        error.add_note(f"Afterwards {why}.")
        return why
    return ""


def _save(error: BaseException, loop: "Loop", *, lacking: str) -> None:
    """Save what can be saved without the other ranks, and say so.

    Args:
        lacking: why this rank does not hold the state as of the last committed update any more; "" if it does.
    """
    checkpointer, update = loop.checkpointer, loop.engine.progress.update
    checkpointer.settle_alone()
    if isinstance(error, KeyboardInterrupt | CheckpointError | ReplicaError) or update == 0:
        return  # the user is in a hurry, the disk or the state is the trouble, or nothing was reached
    if update <= checkpointer.saved_at:
        return
    if lacking:
        _tell(checkpointer, update, f"{lacking}: the newest checkpoint stands.")
    else:
        _save_state(checkpointer, update)


def _save_state(checkpointer: Checkpointer, update: int) -> None:
    state, folder, resumed_from = checkpointer.state.part(), checkpointer.folder, checkpointer.resumed_from
    place, places = checkpointer.state.part_held
    if places == 1:
        path = write_emergency(folder.checkpoints, update, state, resumed_from=resumed_from)
        message = f"the state after update {update} is saved in {path}."
        if path is not None and folder.mirror is not None:
            message += _copied(folder.mirror, path)
    else:
        run = folder.checkpoints.parent
        path = write_part(run, update, state, place=place, places=places, resumed_from=resumed_from)
        message = (
            f"part {place + 1} of {places} of the state after update {update} is saved in {path}; if the other "
            f"ranks save theirs, `resume` goes on from there."
        )
    if path is not None:
        checkpointer.saved_at = update
        _tell(checkpointer, update, message)


def _copied(mirror: Mirror, path: Path) -> str:
    try:
        mirror.copy(path)
    except CheckpointError as error:
        return f" There is no copy of it: {error}"
    return f" Its copy is in {mirror.address}."


def _tell(checkpointer: Checkpointer, update: int, message: str) -> None:
    checkpointer.reporter.report(Incident(kind="emergency", update=update, message=message, details={}))
