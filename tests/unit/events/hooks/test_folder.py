"""Hooks that write into the run folder: status, traces."""

import gzip
import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import kit
from evenstep import Profile
from evenstep.events import Bus, EpochEvent, Status, TrainEvent, UpdateEvent
from evenstep.events.hooks import status as module

BEGIN = TrainEvent(update=5, updates=100, resumed=True)


def attached(trainer: Any, **arguments: Any) -> Status:
    hook = Status(**arguments)
    Bus([hook], trainer)
    return hook


def read(trainer: Any) -> dict[str, Any]:
    return json.loads((trainer.folder / "status.json").read_text())


def test_the_status_is_running_and_written_every_few_seconds(trainer: Any, monkeypatch: Any) -> None:
    now = 50.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    hook = attached(trainer, every_s=10)
    hook.before_train(BEGIN)
    status = read(trainer)
    started = datetime.fromisoformat(status.pop("started"))
    assert started.utcoffset() == timedelta(0) and datetime.fromisoformat(status.pop("changed")) >= started
    expected = {"state": "running", "update": 5, "updates": 100, "epoch": None, "reason": None, "pid": os.getpid()}
    assert status == expected
    hook.before_epoch(EpochEvent(update=5, epoch=2))
    seen: list[int] = []
    for update in range(6, 30):
        now += 1
        hook.after_update(UpdateEvent(update=update, committed=update != 15))
        seen.append(read(trainer)["update"])
    assert sorted(set(seen)) == [5, 16, 26]
    assert read(trainer)["epoch"] == 2


@pytest.mark.parametrize(
    ("outcome", "error", "reason"),
    [("stopped", None, "all is done"), ("failed", ValueError("no more memory"), "ValueError: no more memory")],
)
def test_the_status_has_the_end_and_its_reason(trainer: Any, outcome: Any, error: Any, reason: str) -> None:
    hook = attached(trainer)
    hook.before_train(BEGIN)
    hook.after_train(TrainEvent(update=7, outcome=outcome, reason="all is done", error=error))
    status = read(trainer)
    assert (status["state"], status["update"], status["reason"]) == (outcome, 7, reason)


def test_a_trace_names_updates_and_actions_and_changes_no_bit(tmp_path: Path) -> None:
    profiled, plain = kit.net(), kit.net()
    data: Any = {"size": 4, "micro": 2}
    kit.trainer_of(profiled, Profile(first=2, last=3), folder=tmp_path / "a", data=kit.data(**data)).train()
    kit.trainer_of(plain, data=kit.data(**data)).train()
    assert torch.equal(kit.flat(profiled), kit.flat(plain))
    (path,) = (tmp_path / "a" / "profile").iterdir()
    assert path.name == "updates-2-3-rank-0.trace.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    named = [one for one in events if one.get("cat") == "user_annotation"]
    count = {name: sum(one["name"] == name for one in named) for name in {one["name"] for one in named}}
    expected = {"update 2", "update 3", "0F0 forward", "0B0 backward", "0F1 forward", "0B1 backward", "apply"}
    assert expected <= set(count)
    assert (count["update 2"], count["0F0 forward"], count["apply"]) == (1, 2, 2)
    update, forward = (next(one for one in named if one["name"] == name) for name in ("update 2", "0F0 forward"))
    assert update["ts"] <= forward["ts"]
    assert forward["ts"] + forward["dur"] <= update["ts"] + update["dur"]
