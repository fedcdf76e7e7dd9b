"""`status.json` and `starts.jsonl` of the run folder: how the run is, and how it was started each time."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import monotonic
from typing import final

import numpy
import torch

from evenstep.errors import keepable
from evenstep.events.event import EpochEvent, Json, TrainEvent, UpdateEvent
from evenstep.events.files import append, appending, replace_text, writing
from evenstep.events.hook import Hook, run_folder
from evenstep.schema import NonNegative
from evenstep.version import __version__

STARTS = "starts.jsonl"

_GIT = ("git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
_GIT_TIMEOUT_S = 5.0


@final
class Status(Hook):
    """Writes `status.json`: {state, update, updates, epoch, reason, pid, started, changed}; times are UTC in ISO 8601.

    `state` is running, done, stopped or failed; a killed process leaves "running". Each start of the run appends a line
    to `starts.jsonl`.

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
        write_start(run_folder(self), event)

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


def write_start(folder: Path, event: TrainEvent) -> None:
    """Append a line on this start: command, source, versions and machine, without the names of machine and user."""
    line: dict[str, Json] = {
        "time": _now(),
        "update": event.update,
        "resumed_from": event.resumed_from,
        "command": [*sys.argv],
        "layout": dict(event.layout),
        "git": git_state(Path.cwd()),
        "environment": describe_environment(),
    }
    with writing(folder / STARTS, then="start it again"):
        folder.mkdir(parents=True, exist_ok=True)
        with appending(folder / STARTS) as file:
            append(file, json.dumps(line) + "\n")


@cache
def git_state(folder: Path) -> str | None:
    """Commit of the working tree around `folder`, as of the first call, with "-dirty" if a file was changed."""
    try:
        done = subprocess.run(_GIT, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def describe_environment() -> dict[str, Json]:
    """Versions, processor and accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names: list[Json] = [accelerator.type] * torch.accelerator.device_count() if accelerator else []
    if accelerator is not None and accelerator.type == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(len(names))]
    return {
        "evenstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "accelerators": names,
        "cuda": torch.version.cuda,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
