"""Hooks that measure, and that write into the run folder."""

import gzip
import json
import math
import os
from datetime import datetime, timedelta
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kit
from evenstep import Profile
from evenstep.events import Bus, EpochEvent, Statistics, Status, Timer, TrainEvent, UpdateEvent
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


def attached_to(trainer: Any, hook: Any) -> Any:
    Bus([hook], trainer)
    hook.before_train(TrainEvent(update=0))
    return hook


def settled(trainer: Any, prefix: str = "") -> dict[str, float]:
    return {one.name: one.value for one in trainer.storage.settle() if one.name.startswith(prefix)}


def window_update(hook: Timer, number: int, *, committed: bool = True) -> None:
    hook.before_update(UpdateEvent(update=number, num_microbatches=1))
    hook.after_update(UpdateEvent(update=number, committed=committed, num_samples=8))


def test_a_window_is_time_over_updates_and_samples_over_time(trainer: Any) -> None:
    hook = attached_to(trainer, Timer(every_updates=2))
    window_update(hook, 1)
    window_update(hook, 2, committed=False)
    assert settled(trainer) == {}
    trainer.progress.samples = 16
    began = time()
    window_update(hook, 2)
    values = settled(trainer)
    assert began <= values.pop("perf/time") <= time()
    assert values.pop("perf/memory_peak_bytes") > 2**20
    assert values == {
        "progress/samples": 16,
        "perf/update_s": 0.75,  # without the save and the evaluation
        "perf/samples_per_s": 16 / 1.5,
        "perf/data_s": 0.5,
        "perf/forward_s": 0.25,
        "perf/save_s": 1.0,
        "perf/evaluate_s": 2.0,
    }
    window_update(hook, 3)
    hook.after_train(TrainEvent(update=3, outcome="done"))  # the last window may be short
    assert settled(trainer)["perf/update_s"] == 1.5


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_peak_of_memory_is_put_at_the_end_of_each_window(
    trainer: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = attached_to(trainer, Timer(every_updates=2))
    reset: list[Any] = []
    if device != "cpu":
        one = SimpleNamespace(device=torch.device(device))
        named = trainer.model.named_parameters
        replaced = SimpleNamespace(parameters=lambda: iter([one]), named_parameters=named)
        monkeypatch.setattr(trainer, "model", replaced)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    hook.after_update(UpdateEvent(update=1, committed=True))
    assert settled(trainer) == {}
    hook.after_update(UpdateEvent(update=2, committed=True))
    peak = settled(trainer)["perf/memory_peak_bytes"]
    assert peak > 2**20 if device == "cpu" else (peak, len(reset)) == (5.0, 1)


def stepped(hook: Statistics, trainer: Any, number: int, *, committed: bool = True) -> dict[str, float]:
    hook.before_update(UpdateEvent(update=number, num_microbatches=1))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.5)
    hook.after_update(UpdateEvent(update=number, committed=committed))
    return settled(trainer)


def test_norms_and_ratios_are_those_of_each_group(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [{"params": [trainer.model.weight], "lr": 0.5}, {"params": [trainer.model.bias], "lr": torch.tensor(0.25)}]
    trainer.optimizer = torch.optim.SGD(groups)
    hook = attached_to(trainer, Statistics(every_updates=2, update_ratio=True))
    assert stepped(hook, trainer, 1) == stepped(hook, trainer, 2, committed=False) == {}
    values = stepped(hook, trainer, 2)
    expected = {"train/lr/0": 0.5, "train/lr/1": 0.25}
    for index, parameter in enumerate([trainer.model.weight, trainer.model.bias]):
        norm = parameter.detach().double().norm().item()
        expected[f"train/param_norm/{index}"] = norm
        expected[f"train/update_ratio/{index}"] = 0.5 * math.sqrt(parameter.numel()) / norm
    assert values == pytest.approx(expected, rel=1e-5)
    plain = attached_to(trainer, Statistics(every_updates=1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", None, raising=False)  # without the ratio nothing is copied
        assert stepped(plain, trainer, 1).keys() == {name for name in expected if "ratio" not in name}
