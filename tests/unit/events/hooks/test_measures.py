import math
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.events import (
    Bus,
    Statistics,
    Timer,
    TrainEvent,
    UpdateEvent,
)


def attached(trainer: Any, hook: Any) -> Any:
    Bus([hook], trainer)
    hook.before_train(TrainEvent(update=0))
    return hook


def settled(trainer: Any, prefix: str = "") -> dict[str, float]:
    return {one.name: one.value for one in trainer.storage.settle() if one.name.startswith(prefix)}


def update(hook: Timer, number: int, *, committed: bool = True) -> None:
    hook.before_update(UpdateEvent(update=number, num_microbatches=1))
    hook.after_update(UpdateEvent(update=number, committed=committed, num_samples=8))


def test_a_window_is_time_over_updates_and_samples_over_time(trainer: Any) -> None:
    hook = attached(trainer, Timer(every_updates=2))
    update(hook, 1)
    update(hook, 2, committed=False)
    assert settled(trainer) == {}
    trainer.progress.samples = 16
    began = time()
    update(hook, 2)
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
    update(hook, 3)
    hook.after_train(TrainEvent(update=3, outcome="done"))  # the last window may be short
    assert settled(trainer)["perf/update_s"] == 1.5


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_peak_of_memory_is_put_at_the_end_of_each_window(
    trainer: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = attached(trainer, Timer(every_updates=2))
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
