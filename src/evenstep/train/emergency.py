"""End of a run by an error, which is never hidden: saves the last committed update, and reports the error."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from evenstep.checkpoint import write_emergency
from evenstep.errors import CheckpointError, LostRankError, ReplicaError, clause
from evenstep.events import Incident
from evenstep.parallel.group import Interrupted
from evenstep.train.checkpointer import Checkpointer
from evenstep.train.reporter import failed

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


def emergency_save(error: BaseException, loop: "Loop", *, end: Callable[[], None]) -> None:
    """Go back to the last committed update, save it and write its metrics.

    Args:
        end: tells writers of the end.
    """
    engine = loop.engine
    try:
        if not isinstance(error, LostRankError) or isinstance(error, Interrupted):  # other ranks wait for this rank
            engine.group.fail(clause(error))
        is_whole = engine.parts.core.is_whole
        unread = _abandon(error, loop)
        lacking = "" if is_whole and engine.parts.core.is_whole else "the error came while the state was changed"
        with ExitStack() as after:  # each is called, also if hooks or screens raise
            after.callback(end)
            if loop.checkpointer.enabled:
                after.callback(_save, error, loop.checkpointer, unread or lacking)
            if engine.group.ranks == 1 and not unread:  # other ranks may not be there to sum with
                after.callback(loop.write_known)  # first, so that the checkpoint has these metrics
            loop.reporter.report(failed(error, engine.group, engine.progress.update))
    except Exception as second:  # noqa: BLE001 - attached to the error in flight
        error.add_note(f"Then writing the last metrics raised {type(second).__name__}: {second}")


def _abandon(error: BaseException, loop: "Loop") -> str:
    try:
        loop.abandon()
    except RuntimeError as second:
        why = f"values on the device can't be read any more ({clause(str(second).partition(chr(10))[0])})"
        error.add_note(f"Afterwards {why}.")
        return why
    return ""


def _save(error: BaseException, checkpointer: Checkpointer, lacking: str) -> None:
    update = checkpointer.state.engine.progress.update
    checkpointer.settle_alone()
    if isinstance(error, KeyboardInterrupt | CheckpointError | ReplicaError) or update <= max(checkpointer.saved_at, 0):
        return  # the user is in a hurry, the disk or the state is the trouble, or nothing is new
    if not lacking and not checkpointer.state.is_on_each_rank:
        lacking = "other ranks hold parts of the state"
    message = f"{lacking}: the newest checkpoint stands." if lacking else _saved(checkpointer, update)
    if message:
        checkpointer.reporter.report(Incident(kind="emergency", update=update, message=message))


def _saved(checkpointer: Checkpointer, update: int) -> str:
    state, folder = checkpointer.state.state_dict(whole=True), checkpointer.folder
    path = write_emergency(folder.checkpoints, update, state, resumed_from=checkpointer.resumed_from)
    if path is None:
        return ""
    checkpointer.saved_at = update
    message = f"the state after update {update} is saved in {path}."
    if folder.mirror is None:
        return message
    try:
        folder.mirror.copy(path)
    except CheckpointError as error:
        return f"{message} There is no copy of it: {error}"
    return f"{message} Its copy is in {folder.mirror.address}."
