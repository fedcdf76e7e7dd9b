"""`status.json` of the run folder: the state of the run."""

import json
import os
from datetime import UTC, datetime
from time import monotonic
from typing import final

from evenstep.errors import keepable
from evenstep.events.event import EpochEvent, TrainEvent, UpdateEvent
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook, run_folder
from evenstep.schema import NonNegative


@final
class Status(Hook):
    """Writes `status.json`: {state, update, updates, epoch, reason, pid, started, changed}; times are UTC in ISO 8601.

    `state` is running, done, stopped or failed; a killed process leaves "running".

    Args:
        every_s: shortest time between two writes, in seconds.

    >>> hook = Status(every_s=30)
    """

    first_rank_only = True
    failure_policy = "continue"
    draws = False

    def __init__(self, *, every_s: NonNegative = 10.0) -> None:
        self._every_s = every_s
        self._written_at = 0.0
        self._started = ""
        self._epoch: int | None = None

    def before_train(self, event: TrainEvent) -> None:
        self._started = _now()
        self._epoch = None
        self._write("running", event.update)

    def before_epoch(self, event: EpochEvent) -> None:
        self._epoch = event.epoch

    def after_update(self, event: UpdateEvent) -> None:
        if event.committed and monotonic() - self._written_at >= self._every_s:
            self._write("running", event.update)

    def after_train(self, event: TrainEvent) -> None:
        reason = event.reason if event.error is None else keepable(f"{type(event.error).__name__}: {event.error}")
        self._write(event.outcome, event.update, reason)

    def _write(self, state: str, update: int, reason: str | None = None) -> None:
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
        replace_text(run_folder(self) / "status.json", json.dumps(status, indent=2) + "\n")
        self._written_at = monotonic()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
