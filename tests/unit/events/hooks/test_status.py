import json
import os
from datetime import datetime, timedelta
from typing import Any

import pytest

from evenstep.errors import HookError
from evenstep.events import Bus, EpochEvent, Status, TrainEvent, UpdateEvent
from evenstep.events.hooks import status as module
from refused import refused

BEGIN = TrainEvent(update=5, updates=100, resumed=True)


def attached(trainer: Any, **arguments: Any) -> Status:
    hook = Status(**arguments)
    Bus([hook], trainer)
    return hook


def read(trainer: Any) -> dict[str, Any]:
    return json.loads((trainer.folder / "status.json").read_text())


def test_a_run_that_begins_is_running(trainer: Any) -> None:
    attached(trainer).before_train(BEGIN)
    status = read(trainer)
    started = datetime.fromisoformat(status.pop("started"))
    assert started.utcoffset() == timedelta(0)
    assert datetime.fromisoformat(status.pop("changed")) >= started
    expected = {"state": "running", "update": 5, "updates": 100, "epoch": None, "reason": None, "pid": os.getpid()}
    assert status == expected


def test_it_is_written_no_more_often_than_told(trainer: Any, monkeypatch: Any) -> None:
    now = 50.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    hook, seen = attached(trainer, every_s=10), []
    hook.before_train(BEGIN)
    hook.before_epoch(EpochEvent(update=5, epoch=2))
    for update in range(6, 30):
        now += 1
        hook.after_update(UpdateEvent(update=update, committed=update != 15, num_samples=1))
        seen.append(read(trainer)["update"])
    assert sorted(set(seen)) == [5, 16, 26]
    assert read(trainer)["epoch"] == 2


@pytest.mark.parametrize(
    ("outcome", "error", "reason"),
    [
        ("done", None, "all is done"),
        ("stopped", None, "all is done"),
        ("failed", ValueError("no more memory"), "ValueError: no more memory"),
    ],
)
def test_the_end_is_told_with_its_reason(trainer: Any, outcome: Any, error: Any, reason: str) -> None:
    hook = attached(trainer)
    hook.before_train(BEGIN)
    hook.after_train(TrainEvent(update=7, outcome=outcome, reason="all is done", error=error))
    status = read(trainer)
    assert (status["state"], status["update"], status["reason"]) == (outcome, 7, reason)


def test_without_a_folder_training_does_not_begin(trainer: Any) -> None:
    trainer.folder = None
    with refused(HookError, "Status"):
        attached(trainer).before_train(BEGIN)
