"""`status.json` and `starts.jsonl` of the run folder: how the run is, and how it was started each time.

A killed process leaves its status at "running", with its process id.
"""

import json
import os
from datetime import UTC, datetime
from time import monotonic
from typing import Literal, final

from evenstep.errors import keepable
from evenstep.events.event import EpochBegin, Outcome, TrainBegin, TrainEnd, UpdateEnd
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook, run_folder
from evenstep.events.start import write_start
from evenstep.schema import NonNegative


@final
class Status(Hook):
    """Writes {state, update, updates, epoch, reason, pid, started, changed}; times are UTC in ISO 8601.

    `state` is running, done, stopped or failed; `update` counts committed updates of `updates` planned ones; `reason`
    says why the run ended, and is null before. Each start of the run appends a line to `starts.jsonl`.

    Args:
        every_s: shortest time between two writes, in seconds.

    >>> hook = Status(every_s=30)
    """

    first_rank_only = True
    failure_policy = "continue"
    draws = False
    may_evaluate = False

    def __init__(self, *, every_s: NonNegative = 10.0) -> None:
        self._every_s = every_s
        self._written_at = 0.0
        self._started = ""
        self._epoch: int | None = None

    def before_train(self, event: TrainBegin) -> None:
        self._started = _now()
        self._epoch = None
        self._write("running", event.update)
        write_start(run_folder(self), event, layout=self.trainer.layout, resumed_from=self.trainer.resumed_from)

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
        replace_text(run_folder(self) / "status.json", json.dumps(status, indent=2) + "\n")
        self._written_at = monotonic()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
