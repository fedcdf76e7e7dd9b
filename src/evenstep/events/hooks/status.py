"""status.json in the run folder: whether the run runs, how far it is, how it ended; for people and scripts.

The file is replaced as a whole, so a reader never sees half of one. It is not read by evenstep, and a killed process
leaves it at "running", with its process id.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Literal, final

from evenstep.errors import HookError, keepable
from evenstep.events.event import EpochBegin, Outcome, TrainBegin, TrainEnd, UpdateEnd
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook
from evenstep.events.start import write_start


@final
class Status(Hook):
    """Write {state, update, updates, epoch, reason, pid, started, changed}; times are UTC in ISO 8601.

    `state` is running, done, stopped or failed; `update` counts committed updates of `updates` planned; `reason` is
    why the run ended, and null before.

    Each start of the run is a line of `starts.jsonl`: from what it went on, by which command, on what.

    Args:
        every_s: the shortest time between two writes while the run runs, in seconds.

    >>> hook = Status(every_s=30)
    """

    first_rank_only = True
    failure_policy = "continue"  # a full disk is no reason to stop training

    def __init__(self, *, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._written_at = 0.0
        self._started = ""
        self._epoch: int | None = None

    def before_train(self, event: TrainBegin) -> None:
        self._started = _now()
        self._epoch = None
        self._write("running", event.update)
        write_start(self._folder(), event, layout=self.trainer.layout, resumed_from=self.trainer.resumed_from)

    def before_epoch(self, event: EpochBegin) -> None:
        self._epoch = event.epoch

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed and monotonic() - self._written_at >= self._every_s:
            self._write("running", event.update)

    def after_train(self, event: TrainEnd) -> None:
        reason = event.reason if event.error is None else keepable(f"{type(event.error).__name__}: {event.error}")
        self._write(event.outcome, event.update, reason)

    def _write(self, state: Literal["running"] | Outcome, update: int, reason: str | None = None) -> None:
        status = {
            "state": state,
            "update": update,
            "updates": self.trainer.updates,
            "epoch": self._epoch,
            "reason": reason,
            "pid": os.getpid(),
            "started": self._started,
            "changed": _now(),
        }
        replace_text(self._folder() / "status.json", json.dumps(status, indent=2) + "\n")
        self._written_at = monotonic()

    def _folder(self) -> Path:
        if self.trainer.folder is None:
            raise HookError(
                f"hook `{self.name}` writes a file, but the trainer has no `folder`; give it one.", field=self.name
            )
        return self.trainer.folder


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
