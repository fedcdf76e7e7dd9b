"""Hooks that request stops, saves and evaluations."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kit
from clock import Clock
from evenstep import Trainer
from evenstep.events import (
    Best,
    Bus,
    EarlyStop,
    EpochEvent,
    Evaluate,
    EvaluateEvent,
    Save,
    SaveEvent,
    StopBelowLr,
    StopFile,
    TimeBudget,
    TrainEvent,
    UpdateEvent,
)
from evenstep.events.hooks import periods, stops
from evenstep.optim.schedules import Linear


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(1000.0)
    monkeypatch.setattr(stops, "monotonic", made)
    return made


def attached(trainer: Any, hook: Any, state: dict[str, Any] | None = None) -> Any:
    Bus([hook], trainer)
    if state:
        hook.load_state_dict(state)
    return hook


def evaluate(hook: EarlyStop, *losses: float, first_update: int = 1) -> None:
    for update, loss in enumerate(losses, first_update):
        hook.after_evaluate(EvaluateEvent(update=update, name="valid", metrics={"valid/loss": loss}))


@pytest.mark.parametrize(
    ("losses", "min_delta", "stops_at"),
    [
        ([3.0, 3.5, 2.0, 2.0, 2.0], 0.0, 5),
        ([3.0, 2.5, 2.0, 1.5, 1.75], 0.5, 5),  # a gain must be above min_delta
        ([3.0, float("nan"), 2.0, 1.0, 0.5], 0.0, None),
    ],
)
def test_early_stop_waits_for_evaluations_without_a_gain(
    trainer: Any, losses: list[float], min_delta: float, stops_at: int | None
) -> None:
    hook = attached(trainer, EarlyStop(patience_evaluations=2, min_delta=min_delta))
    stopped: list[int] = []
    for update, loss in enumerate(losses, 1):
        evaluate(hook, loss, first_update=update)
        if trainer.asked:
            stopped.append(update)
    assert stopped == ([] if stops_at is None else [stops_at])


def test_early_stop_goes_on_waiting_after_a_resume_and_counts_an_update_once(trainer: Any) -> None:
    before = attached(trainer, EarlyStop(patience_evaluations=3))
    evaluate(before, 1.0, 2.0, 2.0)
    after = attached(trainer, EarlyStop(patience_evaluations=3), before.state_dict())
    for _ in range(3):
        evaluate(after, 2.0, first_update=3)
    assert trainer.asked == []
    evaluate(after, 2.0, first_update=4)
    assert trainer.asked == ["stop: `valid/loss` did not improve in 3 evaluations (the best is 1.0)"]


def test_a_time_budget_ends_a_start(trainer: Any, clock: Clock) -> None:
    hook = attached(trainer, TimeBudget(max_minutes=6))
    for _ in range(2):  # each start has its own
        hook.before_train(TrainEvent(update=0, updates=9))
        clock.now += 359
        hook.after_update(UpdateEvent(update=1, committed=True))
        assert trainer.asked == []
        clock.now += 1
        hook.after_update(UpdateEvent(update=2, committed=True))
        assert trainer.asked == ["stop: the time budget of 6 minutes is used up (requeue)"]
        trainer.asked.clear()


def falling(folder: Path, updates: int = 10) -> Trainer:
    model = kit.line()
    return kit.trainer_of(
        model,
        StopBelowLr(0.35e-3),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        updates=updates,
        lr_schedule=Linear(warmup_updates=2),
        folder=folder,
    )


def ends_at(lr: float, updates: int) -> int:
    """The first update with a rate below `lr` that does not rise."""
    rates = [1e-3 * Linear(warmup_updates=2)(update, updates) for update in range(1, updates + 1)]
    return next(n for n in range(2, updates + 1) if rates[n - 1] < lr and rates[n - 1] <= rates[n - 2])


@pytest.mark.parametrize(
    ("more", "reset", "update"),
    [
        ({}, (), ends_at(0.35e-3, 10) + 1),  # one more update, and it stops again
        ({"updates": 30}, (), ends_at(0.35e-3, 30)),
        ({}, "lr_schedule", 10),
    ],
)
def test_a_run_stops_below_a_rate_and_goes_on_only_with_another(
    more: Any, reset: Any, update: int, tmp_path: Path
) -> None:
    first = falling(tmp_path / "first").train()
    assert (first.update, first.outcome) == (ends_at(0.35e-3, 10), "stopped")
    again = falling(tmp_path / "again", **more)
    again.resume(tmp_path / "first", reset=reset)
    assert again.train().update == update


def test_a_stop_file_is_removed_and_stops_the_run(trainer: Any, clock: Clock) -> None:
    hook = attached(trainer, StopFile())
    trainer.folder.mkdir()
    file = trainer.folder / "stop"
    hook.after_update(UpdateEvent(update=1, committed=True))
    file.touch()
    hook.after_update(UpdateEvent(update=2, committed=True))
    assert trainer.asked == []  # it looks once a second
    clock.now += 1
    hook.after_update(UpdateEvent(update=3, committed=True))
    assert trainer.asked == [f"stop: there was a file `{file}` (requeue)"] and not file.exists()


def requests(trainer: Any) -> int:
    count = len(trainer.asked)
    trainer.asked.clear()
    return count


@pytest.mark.parametrize("kind", [Evaluate, Save])
def test_committed_updates_and_complete_epochs_are_due(trainer: Any, kind: Any) -> None:
    hook = kind(every_updates=3, every_epochs=2)
    Bus([hook], trainer)
    asked: list[int] = []
    for update in range(1, 10):
        hook.after_update(UpdateEvent(update=update, committed=update != 6))
        asked += [update] * requests(trainer)
    assert asked == [3, 9]
    asked.clear()
    for epoch, complete in [(0, True), (1, False), (1, True), (2, True), (3, True)]:
        hook.after_epoch(EpochEvent(update=10 * epoch, epoch=epoch, complete=complete))
        asked += [epoch] * requests(trainer)
    assert asked == [1, 3]


def test_checkpoints_are_at_most_so_many_minutes_apart(trainer: Any, monkeypatch: Any) -> None:
    now = 0.0
    monkeypatch.setattr(periods, "monotonic", lambda: now)
    hook = Save(every_minutes=1)
    Bus([hook], trainer)
    asked: list[int] = []
    now = 1000.0  # built long before
    hook.before_train(TrainEvent(update=0))
    for update in range(1, 10):
        now += 20
        hook.after_update(UpdateEvent(update=update, committed=True))
        if requests(trainer):
            asked.append(update)
            hook.after_save(SaveEvent(update=update, path=Path("x") if update != 3 else None))
        if update == 5:
            hook.after_save(SaveEvent(update=update, path=Path("x")))  # requested by another hook
    assert asked == [3, 8]  # the failed one is not repeated at once


def best_attached(trainer: Any, **arguments: Any) -> Best:
    hook = Best(**arguments)
    Bus([hook], trainer)
    return hook


def evaluated(update: int, loss: float) -> EvaluateEvent:
    return EvaluateEvent(update=update, name="valid", metrics={"valid/loss": loss})


def saved(folder: Path, update: int) -> SaveEvent:
    return SaveEvent(update=update, path=folder / "checkpoints" / f"step-{update:08d}")


def link_of(trainer: Any) -> str:
    return (trainer.folder / "best").read_text()


@pytest.mark.parametrize(
    ("keep", "losses", "asks", "kept"),
    [
        (1, [3.0, 3.0, 2.0, 2.5, math.nan, -math.inf, 1.0], [1, 3, 7], [7]),
        (3, [3.0, 5.0, 4.0, 6.0, 3.5, math.nan, 3.5, 2.0], [1, 2, 3, 5, 7, 8], [8, 1, 5]),
    ],
)
def test_a_save_is_requested_for_each_of_the_best(
    trainer: Any, keep: int, losses: list[float], asks: list[int], kept: list[int]
) -> None:
    hook = best_attached(trainer, keep=keep)
    asked: list[int] = []
    for update, loss in enumerate(losses, start=1):
        hook.after_evaluate(evaluated(update, loss))
        asked += [update] * len(trainer.asked)
        trainer.asked.clear()
    assert asked == asks
    assert hook.kept_checkpoints() == tuple(f"step-{update:08d}" for update in kept)
    assert hook.best_value == losses[kept[0] - 1]
    again = best_attached(trainer, keep=keep)
    again.load_state_dict(hook.state_dict())
    assert again.kept_checkpoints() == hook.kept_checkpoints()
    again.after_evaluate(evaluated(20, 9.0))  # worse than those before the resume
    assert trainer.asked == []


def test_a_checkpoint_that_was_not_saved_is_none_of_the_best(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook = best_attached(trainer)
    for update, loss, path in ((10, 2.0, Path("step-00000010")), (20, 1.0, None), (30, 1.5, None)):
        hook.after_evaluate(evaluated(update, loss))
        hook.before_save(SaveEvent(update=update))
        hook.after_save(SaveEvent(update=update, path=path))
    assert (hook.best_value, hook.kept_checkpoints()) == (2.0, ("step-00000010",))
    trainer.asked.clear()
    hook.after_evaluate(evaluated(40, 1.5))  # better than what there is
    assert trainer.asked == ["save"]
    hook.before_save(SaveEvent(update=40))
    hook.after_evaluate(evaluated(50, 1.0))  # while the save of update 40 is under way
    hook.after_save(SaveEvent(update=40))
    assert hook.kept_checkpoints() == ("step-00000050",)


def test_the_link_is_corrected_after_a_kill_and_after_a_rewind(trainer: Any) -> None:
    hook = best_attached(trainer)
    saves = [saved(trainer.folder, update) for update in (10, 20)]
    states: list[Any] = []
    for save, loss in zip(saves, (2.0, 1.0), strict=True):
        states.append(hook.state_dict())
        assert save.path is not None
        save.path.mkdir(parents=True)
        hook.after_evaluate(evaluated(save.update, loss))
        hook.after_save(save)
    hook.load_state_dict(states[1])
    hook.before_epoch(EpochEvent(update=10, epoch=0))
    assert link_of(trainer) == "step-00000010\n"
    (trainer.folder / "best").unlink()
    hook.before_train(TrainEvent(update=10, updates=100, resumed=True))
    assert link_of(trainer) == "step-00000010\n"
    for save in saves:
        assert save.path is not None
        save.path.rmdir()
    hook.load_state_dict(states[0])
    hook.before_epoch(EpochEvent(update=0, epoch=0))
    assert not (trainer.folder / "best").exists()
