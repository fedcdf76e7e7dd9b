"""End of a run by a signal, after which the program ends, or by an error, which is never hidden."""

import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.checkpoint import write_emergency
from evenstep.errors import CheckpointError, LostRankError, ReplicaError, clause
from evenstep.lazy import load
from evenstep.parallel.group import Interrupted
from evenstep.process import EXIT_REQUEUE, REQUEUE, stopping
from evenstep.train.checkpointer import Checkpointer

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


@contextmanager
def handling_signals(loop: "Loop") -> Generator[None]:
    """Stop `loop` at a signal; after the `with`, end the program. The run's folder gets its page in any case.

    Raises:
        KeyboardInterrupt: Ctrl-C came on some rank.
        SystemExit: another signal came; exit code 75, or 128 + its number if a hook had stopped the run for good.
    """
    folder, requests = loop.checkpointer.folder, loop.requests
    with stopping(requests.signal, spares_own=True) as caught:
        try:
            yield
        finally:
            is_done = requests.is_for_good
            requests.forget_stop()  # not at the beginning: a signal may have come before
            if folder.path is not None and folder.is_claimed and loop.engine.group.rank == 0:
                _write_page(folder.path, loop)
    _end_program(loop, caught(), is_done=is_done)


def _write_page(folder: Path, loop: "Loop") -> None:
    if not (folder / "status.json").exists():
        return  # it never began
    try:
        load("evenstep.tools.report:write_report")(folder)
    except Exception as error:  # noqa: BLE001 - not lost: it is an incident
        loop.reporter.say("report", loop.engine.progress.update, str(error), traceback=traceback.format_exc())


def _end_program(loop: "Loop", number: signal.Signals | None, *, is_done: bool) -> None:
    """Raise if a signal has reached any rank while it trained; all ranks call it together."""
    everybody = loop.engine.group.gather((number, is_done))
    numbers = [each for each, _ in everybody if each is not None]
    if not numbers:
        return
    first, update = numbers[0], loop.engine.progress.update
    by = "Ctrl-C" if first == signal.SIGINT else first.name
    where = "with nothing saved, as the trainer keeps no checkpoints"
    if loop.checkpointer.enabled:
        where = f"saved in {loop.checkpointer.folder.checkpoint_of(update)}"
    is_done = first in REQUEUE and any(done for _, done in everybody)
    end = ", as a hook had stopped the run for good." if is_done else "; `train()` goes on from there, `resume()` too."
    text = f"stopped by {by} after update {update}, {where}{end}"
    if first not in REQUEUE:
        raise KeyboardInterrupt(text)
    if loop.engine.group.rank == 0:
        print(f"evenstep: {text}", file=sys.stderr, flush=True)
    raise SystemExit(128 + first if is_done else EXIT_REQUEUE)


def emergency_save(error: BaseException, loop: "Loop", *, end: Callable[[], None]) -> None:
    """Go back to the last committed update, save it, write its metrics, and report the error.

    Args:
        end: tells writers of the end.
    """
    engine, is_lost = loop.engine, isinstance(error, LostRankError)
    try:
        if not is_lost or isinstance(error, Interrupted):  # other ranks wait for this rank
            engine.group.fail(clause(error))
        lacking = "" if engine.parts.core.is_whole else "the error came while the state was changed"
        is_readable = True
        try:
            loop.abandon()
        except RuntimeError as second:
            is_readable = False
            lacking = f"values on the device can't be read any more ({clause(str(second).partition(chr(10))[0])})"
            error.add_note(f"Afterwards {lacking}.")
        with ExitStack() as after:  # each is called, also if hooks or screens raise
            after.callback(end)
            if loop.checkpointer.enabled:
                after.callback(_save, error, loop.checkpointer, lacking)
            if engine.group.ranks == 1 and is_readable:  # other ranks may not be there to sum with
                after.callback(loop.write_known)  # first, so that the checkpoint has these metrics
            loop.reporter.say(
                "lost_rank" if is_lost else "failed",
                engine.progress.update,
                f"{type(error).__name__}: {error}",
                rank=engine.group.rank,
                traceback="".join(traceback.format_exception(error)),
            )
    except Exception as second:  # noqa: BLE001 - attached to the error in flight
        error.add_note(f"Then writing the last metrics raised {type(second).__name__}: {second}")


def _save(error: BaseException, checkpointer: Checkpointer, lacking: str) -> None:
    state, folder = checkpointer.state, checkpointer.folder
    update = state.engine.progress.update
    checkpointer.settle_alone()
    if isinstance(error, KeyboardInterrupt | CheckpointError | ReplicaError) or update <= max(checkpointer.saved_at, 0):
        return  # the user is in a hurry, the disk or the state is the trouble, or nothing is new
    if not state.engine.parts.core.is_whole:
        lacking = lacking or "the error came while the state was changed"
    elif not state.is_on_each_rank:
        lacking = lacking or "other ranks hold parts of the state"
    message = f"{lacking}: the newest checkpoint stands."
    if not lacking:
        resumed_from = checkpointer.resumed_from
        path = write_emergency(folder.checkpoints, update, state.state_dict(whole=True), resumed_from=resumed_from)
        if path is None:
            return
        checkpointer.saved_at = update
        message = f"the state after update {update} is saved in {path}."
        try:
            if folder.mirror is not None:
                folder.mirror.copy(path)
                message += f" Its copy is in {folder.mirror.address}."
        except CheckpointError as second:
            message += f" There is no copy of it: {second}"
    checkpointer.reporter.say("emergency", update, message)
