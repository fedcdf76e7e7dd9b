"""Ctrl-C and SIGTERM around training: the run saves, then the program ends."""

import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.events import Incident
from evenstep.lazy import load
from evenstep.parallel import Group
from evenstep.process import EXIT_REQUEUE, REQUEUE, stopping

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


@contextmanager
def handling_signals(loop: "Loop") -> Generator[None]:
    """Stop `loop` at a signal; after the `with`, end the program. The run's folder gets its page in any case.

    Raises:
        KeyboardInterrupt: Ctrl-C came on some rank.
        SystemExit: another signal came; exit code 75, or 128 + its number if a hook had stopped the run for good.
    """
    engine, folder, requests = loop.engine, loop.checkpointer.folder, loop.requests
    with stopping(requests.signal, spares_own=True) as caught:
        try:
            yield
        finally:
            is_done = requests.is_for_good
            requests.forget_stop()  # not at the beginning: a signal may have come before
            if folder.path is not None and folder.is_claimed and engine.group.rank == 0:
                _write_page(folder.path, loop)
    update = engine.progress.update
    saved = folder.checkpoint_of(update) if loop.checkpointer.enabled else None
    end_program(caught(), group=engine.group, update=update, saved=saved, is_done=is_done)


def _write_page(folder: Path, loop: "Loop") -> None:
    if not (folder / "status.json").exists():
        return  # it never began
    try:
        load("evenstep.tools.report:write_report")(folder)
    except Exception as error:  # noqa: BLE001 - not lost: it is an incident
        trace = traceback.format_exc()
        loop.reporter.report(
            Incident(kind="report", update=loop.engine.progress.update, message=str(error), traceback=trace)
        )


def end_program(
    number: signal.Signals | None, *, group: Group, update: int, saved: Path | None, is_done: bool = False
) -> None:
    """Raise if a signal (`number`) has reached any rank while it trained; all ranks call it together."""
    everybody = group.gather((number, is_done))
    numbers = [each for each, _ in everybody if each is not None]
    if not numbers:
        return
    first = numbers[0]
    by = "Ctrl-C" if first == signal.SIGINT else first.name
    where = f"saved in {saved}" if saved is not None else "with nothing saved, as the trainer keeps no checkpoints"
    is_done = first in REQUEUE and any(done for _, done in everybody)
    if is_done:
        text = f"ended by {by}, after a hook had stopped the run for good at update {update}, {where}."
    else:
        process = ", in a new process after `resume()`" if saved is not None else ""
        text = f"stopped by {by} after update {update}, {where}; `train()` goes on from there{process}."
    if first not in REQUEUE:
        raise KeyboardInterrupt(text)
    if group.rank == 0:
        print(f"evenstep: {text}", file=sys.stderr, flush=True)
    raise SystemExit(128 + first if is_done else EXIT_REQUEUE)
