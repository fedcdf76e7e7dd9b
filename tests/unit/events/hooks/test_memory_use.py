from typing import Any

import pytest
import torch

from evenstep.events import Bus, MemoryUse, TrainEvent, UpdateEvent
from evenstep.events.hooks import measures as module
from evenstep.events.hooks.measures import only_extremes


def begun(trainer: Any) -> MemoryUse:
    hook = MemoryUse(every_updates=2)
    Bus([hook], trainer)
    hook.before_train(TrainEvent(update=0, updates=None, resumed=False))
    return hook


def values(trainer: Any) -> dict[str, float]:
    return {record.name: record.value for record in trainer.storage.settle()}


def test_on_a_cpu_it_is_the_process_at_the_end_of_each_window(trainer: Any) -> None:
    hook = begun(trainer)
    hook.after_update(UpdateEvent(update=1, committed=True, num_samples=8))
    assert values(trainer) == {}
    hook.after_update(UpdateEvent(update=2, committed=True, num_samples=8))
    before = values(trainer)
    held = torch.ones(16 * 2**20)
    hook.after_update(UpdateEvent(update=4, committed=True, num_samples=8))
    after = values(trainer)
    assert before.keys() == after.keys() == {"perf/memory_peak_bytes", "perf/memory_resident_bytes"}
    taken = after["perf/memory_resident_bytes"] - before["perf/memory_resident_bytes"]
    assert 0.9 * held.nbytes < taken < 1.5 * held.nbytes
    assert after["perf/memory_peak_bytes"] >= after["perf/memory_resident_bytes"] * 0.99  # the kernel counts in batches


def test_on_cuda_it_is_the_allocator_and_its_peak_begins_anew(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    counters: dict[str, Any] = {"max_memory_allocated": 5, "memory_reserved": 7, "mem_get_info": (11, 20)}
    for name, value in {**counters, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: (asked.append(name), value)[1])
    hook = begun(trainer)
    monkeypatch.setattr(hook, "_device", torch.device("cuda:0"))
    hook.after_update(UpdateEvent(update=2, committed=True, num_samples=8))
    assert values(trainer) == {
        "perf/memory_peak_bytes": 5.0,
        "perf/memory_reserved_bytes": 7.0,
        "perf/memory_free_bytes": 11.0,
    }
    assert asked.index("reset_peak_memory_stats") > asked.index("max_memory_allocated")


def test_a_system_without_proc_has_the_peak_alone(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(module, "_STATM", tmp_path / "none")
    hook = begun(trainer)
    hook.after_update(UpdateEvent(update=2, committed=True, num_samples=8))
    assert values(trainer).keys() == {"perf/memory_peak_bytes"}


def test_of_several_ranks_it_is_the_one_with_the_most_and_the_least_that_is_free() -> None:
    def rank(peak: float, free: float, loss: float) -> dict[tuple[int, str], tuple[float, float]]:
        said = {"perf/memory_peak_bytes": peak, "perf/memory_free_bytes": free, "loss": loss}
        return {(3, name): (value, 1.0) for name, value in said.items()}

    first, second = only_extremes([rank(5.0, 1.0, 0.5), rank(9.0, 2.0, 0.25)])
    assert first == {(3, "perf/memory_free_bytes"): (1.0, 1.0), (3, "loss"): (0.5, 1.0)}
    assert second == {(3, "perf/memory_peak_bytes"): (9.0, 1.0), (3, "loss"): (0.25, 1.0)}
