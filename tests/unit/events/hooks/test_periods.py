from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import ArgumentError
from evenstep.events import Bus, EpochEvent, Evaluate, Save, SaveEvent, TrainEvent, UpdateEvent
from evenstep.events.hooks import periods as module
from refused import refused

BOTH = pytest.mark.parametrize("kind", [Evaluate, Save])


def requests(trainer: Any) -> int:
    count = len(trainer.asked)
    trainer.asked.clear()
    return count


@BOTH
def test_committed_updates_are_due_when_their_number_divides_by_the_period(trainer: Any, kind: Any) -> None:
    hook, asked = kind(every_updates=3), []
    Bus([hook], trainer)
    for update in range(1, 10):
        hook.after_update(UpdateEvent(update=update, committed=update != 6, num_samples=1))
        asked += [update] * requests(trainer)
    assert asked == [3, 9]


@BOTH
def test_complete_epochs_are_due(trainer: Any, kind: Any) -> None:
    hook, asked = kind(every_epochs=2), []
    Bus([hook], trainer)
    for epoch, complete in [(0, True), (1, False), (1, True), (2, True), (3, True)]:
        hook.after_epoch(EpochEvent(update=10 * epoch, epoch=epoch, complete=complete))
        asked += [epoch] * requests(trainer)
    assert asked == [1, 3]


@BOTH
def test_no_period_is_an_error(kind: Any) -> None:
    with refused(ArgumentError, kind.__name__):
        kind()


def test_nothing_is_evaluated_before_the_first_update_to_evaluate(trainer: Any) -> None:
    hook, asked = Evaluate(every_updates=2, every_epochs=1, from_update=6), []
    Bus([hook], trainer)
    for update in range(1, 10):
        hook.after_update(UpdateEvent(update=update, committed=True, num_samples=1))
        if update % 3 == 0:
            hook.after_epoch(EpochEvent(update=update, epoch=update // 3 - 1, complete=True))
        asked += [update] * requests(trainer)
    assert asked == [6, 6, 8, 9]


def test_no_more_than_so_many_minutes_pass_without_a_checkpoint(trainer: Any, monkeypatch: Any) -> None:
    now = 0.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    hook, asked = Save(every_minutes=1), []
    Bus([hook], trainer)
    now = 1000.0  # built long before
    hook.before_train(TrainEvent(update=0, updates=None, resumed=False))
    for update in range(1, 10):
        now += 20
        hook.after_update(UpdateEvent(update=update, committed=True, num_samples=1))
        if requests(trainer):
            asked.append(update)
            hook.after_save(SaveEvent(update=update, path=Path("x") if update != 3 else None))
        if update == 5:
            hook.after_save(SaveEvent(update=update, path=Path("x")))  # requested by another hook
    assert asked == [3, 8]  # the failed one is not repeated at once
