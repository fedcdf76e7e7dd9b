from time import time
from typing import Any

import pytest

from evenstep.events import (
    Bus,
    EvaluateEvent,
    SaveEvent,
    Timer,
    TrainEvent,
    UpdateEvent,
)
from evenstep.events.hooks import measures as module


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def begun(trainer: Any) -> Timer:
    hook = Timer(every_updates=2)
    Bus([hook], trainer)
    hook.before_train(TrainEvent(update=0, updates=None, resumed=False))
    return hook


def update(hook: Timer, clock: Clock, number: int, seconds: float, *, committed: bool = True) -> None:
    hook.before_update(UpdateEvent(update=number, num_microbatches=1, data_s=0.25))
    clock.now += seconds
    hook.after_update(UpdateEvent(update=number, committed=committed, num_samples=8))


def values(trainer: Any) -> dict[str, float]:
    """What the clock has measured; the rest is asked by its name."""
    mine = ("perf/update_s", "perf/samples_per_s", "perf/data_s")
    return {record.name: record.value for record in trainer.storage.settle() if record.name in mine}


def test_a_window_is_time_over_updates_and_samples_over_time(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 1.0)
    assert values(trainer) == {}
    update(hook, clock, 2, 3.0)
    assert values(trainer) == {"perf/update_s": 2.0, "perf/samples_per_s": 4.0, "perf/data_s": 0.25}
    update(hook, clock, 3, 1.0)
    update(hook, clock, 4, 1.0)
    assert values(trainer)["perf/update_s"] == 1.0


def test_evaluations_and_checkpoints_do_not_count(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 1.0)
    hook.before_evaluate(EvaluateEvent(update=1, name="valid"))
    clock.now += 50
    hook.after_evaluate(EvaluateEvent(update=1, name="valid", metrics={}))
    hook.before_save(SaveEvent(update=1))
    clock.now += 70
    hook.after_save(SaveEvent(update=1, path=None))
    update(hook, clock, 2, 2.0)
    assert values(trainer)["perf/update_s"] == 1.5


@pytest.mark.parametrize("ends", ["in the midst", "before the next update", "at the end of the run"])
def test_an_evaluation_during_a_save_in_the_background_is_left_out_once(trainer: Any, clock: Clock, ends: str) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 1.0)
    hook.before_save(SaveEvent(update=1))
    clock.now += 2
    hook.before_evaluate(EvaluateEvent(update=1, name="valid"))
    clock.now += 50
    hook.after_evaluate(EvaluateEvent(update=1, name="valid", metrics={}))
    clock.now += 3
    if ends != "before the next update":
        hook.after_save(SaveEvent(update=1, path=None))
    if ends == "at the end of the run":
        hook.after_train(TrainEvent(update=1, outcome="done", reason="", error=None))
        assert values(trainer)["perf/update_s"] == 1.0
        return
    clock.now += 0.25  # waiting for data
    update(hook, clock, 2, 2.0)
    assert values(trainer)["perf/update_s"] == (1.5 + 0.25 / 2)


def test_an_update_that_was_given_up_costs_time_but_gives_nothing(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 1.0)
    update(hook, clock, 2, 2.0, committed=False)
    assert values(trainer) == {}
    update(hook, clock, 2, 1.0)
    assert values(trainer) == {"perf/update_s": 2.0, "perf/samples_per_s": 4.0, "perf/data_s": 0.25}


def test_the_last_window_may_be_short(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 3.0)
    hook.after_train(TrainEvent(update=1, outcome="done", reason="", error=None))
    assert values(trainer)["perf/update_s"] == 3.0


def test_each_window_says_where_the_run_is_and_where_its_time_went(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer)
    update(hook, clock, 1, 1.0)
    trainer.progress.samples = 16
    began = time()
    update(hook, clock, 2, 3.0)
    said = {record.name: record.value for record in trainer.storage.settle()}
    assert said["progress/samples"] == 16
    assert began <= said["perf/time"] <= time()
    assert said["perf/forward_s"] == 0.25  # half a second, in two updates
    assert "perf/save_s" not in said  # which took none
    assert said["perf/data_s"] == 0.25  # as the updates say
