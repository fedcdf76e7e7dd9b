from pathlib import Path
from typing import Any

import pytest

from evenstep.events import Bus, EpochEvent, Evaluate, Save, SaveEvent, TrainEvent, UpdateEvent
from evenstep.events.hooks import periods as module


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
    monkeypatch.setattr(module, "monotonic", lambda: now)
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
