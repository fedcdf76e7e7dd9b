import math
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clock import Clock
from evenstep.events import (
    Bus,
    EvaluateEvent,
    MemoryUse,
    SaveEvent,
    Statistics,
    Timer,
    TrainEvent,
    UpdateEvent,
)
from evenstep.events.hooks import measures as module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def attached(trainer: Any, hook: Any) -> Any:
    Bus([hook], trainer)
    hook.before_train(TrainEvent(update=0))
    return hook


def settled(trainer: Any, prefix: str = "") -> dict[str, float]:
    return {one.name: one.value for one in trainer.storage.settle() if one.name.startswith(prefix)}


def update(hook: Timer, clock: Clock, number: int, seconds: float, *, committed: bool = True) -> None:
    hook.before_update(UpdateEvent(update=number, num_microbatches=1, data_s=0.25))
    clock.now += seconds
    hook.after_update(UpdateEvent(update=number, committed=committed, num_samples=8))


def test_a_window_is_time_over_updates_and_samples_over_time(trainer: Any, clock: Clock) -> None:
    hook = attached(trainer, Timer(every_updates=2))
    update(hook, clock, 1, 1.0)
    update(hook, clock, 2, 2.0, committed=False)  # which costs time and gives nothing
    assert settled(trainer) == {}
    trainer.progress.samples = 16
    began = time()
    update(hook, clock, 2, 1.0)
    values = settled(trainer)
    assert began <= values.pop("perf/time") <= time()
    assert values == {
        "progress/samples": 16,
        "perf/update_s": 2.0,
        "perf/samples_per_s": 4.0,
        "perf/data_s": 0.25,  # as the updates say
        "perf/forward_s": 0.25,  # half a second, in two updates
    }
    update(hook, clock, 3, 3.0)
    hook.after_train(TrainEvent(update=3, outcome="done"))  # the last window may be short
    assert settled(trainer)["perf/update_s"] == 3.0


@pytest.mark.parametrize("ends", ["in the midst", "before the next update", "at the end of the run"])
def test_an_evaluation_during_a_background_save_is_left_out_once(trainer: Any, clock: Clock, ends: str) -> None:
    hook = attached(trainer, Timer(every_updates=2))
    update(hook, clock, 1, 1.0)
    hook.before_save(SaveEvent(update=1))
    clock.now += 2
    hook.before_evaluate(EvaluateEvent(update=1, name="valid"))
    clock.now += 50
    hook.after_evaluate(EvaluateEvent(update=1, name="valid"))
    clock.now += 3
    if ends != "before the next update":
        hook.after_save(SaveEvent(update=1))
    if ends == "at the end of the run":
        hook.after_train(TrainEvent(update=1, outcome="done"))
        assert settled(trainer)["perf/update_s"] == 1.0
        return
    clock.now += 0.25  # waiting for data
    update(hook, clock, 2, 2.0)
    assert settled(trainer)["perf/update_s"] == (1.5 + 0.25 / 2)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_peak_of_memory_is_put_at_the_end_of_each_window(
    trainer: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = attached(trainer, MemoryUse(every_updates=2))
    reset: list[Any] = []
    if device != "cpu":
        one = SimpleNamespace(device=torch.device(device))
        monkeypatch.setattr(trainer, "model", SimpleNamespace(parameters=lambda: iter([one])))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    hook.after_update(UpdateEvent(update=1, committed=True))
    assert settled(trainer) == {}
    hook.after_update(UpdateEvent(update=2, committed=True))
    ((name, peak),) = settled(trainer).items()
    assert name == "perf/memory_peak_bytes"
    assert peak > 2**20 if device == "cpu" else (peak, len(reset)) == (5.0, 1)


def stepped(hook: Statistics, trainer: Any, update: int, *, committed: bool = True) -> dict[str, float]:
    hook.before_update(UpdateEvent(update=update, num_microbatches=1))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.5)
    hook.after_update(UpdateEvent(update=update, committed=committed))
    return settled(trainer)


def test_norms_and_ratios_are_those_of_each_group(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [{"params": [trainer.model.weight], "lr": 0.5}, {"params": [trainer.model.bias], "lr": torch.tensor(0.25)}]
    trainer.optimizer = torch.optim.SGD(groups)
    hook = attached(trainer, Statistics(every_updates=2, update_ratio=True))
    assert stepped(hook, trainer, 1) == stepped(hook, trainer, 2, committed=False) == {}
    values = stepped(hook, trainer, 2)
    expected = {"train/lr/0": 0.5, "train/lr/1": 0.25}
    for index, parameter in enumerate([trainer.model.weight, trainer.model.bias]):
        norm = parameter.detach().double().norm().item()
        expected[f"train/param_norm/{index}"] = norm
        expected[f"train/update_ratio/{index}"] = 0.5 * math.sqrt(parameter.numel()) / norm
    assert values == pytest.approx(expected, rel=1e-5)
    plain = attached(trainer, Statistics(every_updates=1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", None, raising=False)  # without the ratio nothing is copied
        assert stepped(plain, trainer, 1).keys() == {name for name in expected if "ratio" not in name}
