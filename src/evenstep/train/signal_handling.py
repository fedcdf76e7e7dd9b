"""Signals around training: Ctrl-C and SIGTERM end the update, save, and then end the program.

However training ends, the run's folder gets its page. Handlers of signals are in `evenstep.process`.
"""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.parallel import Group
from evenstep.process import EXIT_REQUEUE, REQUEUE, interrupted, stopping
from evenstep.train.standard_hooks import write_page

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


@contextmanager
def handling_signals(loop: "Loop") -> Generator[None]:
    """Around training.

    Raises:
        KeyboardInterrupt: Ctrl-C came on some rank.
        SystemExit: another signal did, with exit code 75; with 128 + its number, where a hook had stopped the run for
            good.
    """
    engine, folder, group = loop.engine, loop.checkpointer.folder, loop.engine.group
    with stopping(loop.requests.signal, spares_own=True) as caught:
        try:
            yield
        finally:
            # not at the beginning: a signal may have asked before
            is_done = loop.requests.is_for_good
            loop.requests.forget_stop()
            if folder.path is not None and folder.is_claimed and group.rank == 0:
                write_page(folder.path, engine.progress.update, loop.reporter.report)
    update = engine.progress.update
    saved = folder.checkpoint_of(update) if loop.checkpointer.enabled else None
    end_program(caught(), group=group, update=update, saved=saved, is_done=is_done)


def end_program(
    number: signal.Signals | None, *, group: Group, update: int, saved: Path | None, is_done: bool = False
) -> None:
    """Raise if a signal has reached any rank while it trained; all ranks call it together.

    Args:
        number: of the signal that this rank has got, if any.
        saved: the checkpoint of that; None where the run keeps none.
        is_done: whether a hook of this rank has stopped the run for good, so that it is not to be run again.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
        SystemExit: it was another one, with exit code 75; or 128 + its number, where the run is done.
    """
    told = group.gather((number, is_done))
    numbers = [each for each, _ in told if each is not None]  # one rank's is enough
    if not numbers:
        return
    first = numbers[0]
    by = "Ctrl-C" if first == signal.SIGINT else first.name
    where = f"saved in {saved}" if saved is not None else "with nothing saved, as the trainer keeps no checkpoints"
    later = "`train()` goes on from there" + (", in a new process after `resume()`." if saved is not None else ".")
    said = f"stopped by {by} after update {update}, {where}; {later}"
    is_done = first in REQUEUE and any(done for _, done in told)
    if is_done:
        said = f"ended by {by}, after a hook had stopped the run for good at update {update}, {where}."
    if first not in REQUEUE:
        raise interrupted(said)
    if group.rank == 0:
        print(f"evenstep: {said}", file=sys.stderr, flush=True)
    raise SystemExit(128 + first if is_done else EXIT_REQUEUE)
