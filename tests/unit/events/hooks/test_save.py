from pathlib import Path
from typing import Any

from evenstep.errors import ArgumentError
from evenstep.events import Bus, EpochEnd, Save, SaveEnd, TrainBegin, UpdateEnd
from evenstep.events.hooks import periods as module
from refused import refused


def attached(trainer: Any, **arguments: Any) -> Save:
    hook = Save(**arguments)
    Bus([hook], trainer)
    return hook


def test_it_asks_when_the_number_of_a_committed_update_divides_by_the_period(trainer: Any) -> None:
    hook, asked = attached(trainer, every_updates=3), []
    for update in range(1, 10):
        hook.after_update(UpdateEnd(update=update, committed=update != 6, num_samples=1))
        asked += [update for _ in trainer.asked]
        trainer.asked.clear()
    assert asked == [3, 9]


def test_it_asks_after_complete_epochs(trainer: Any) -> None:
    hook, asked = attached(trainer, every_epochs=1), []
    for epoch, complete in [(0, True), (1, False), (2, True)]:
        hook.after_epoch(EpochEnd(update=10 * (epoch + 1), epoch=epoch, complete=complete))
        asked += [epoch for _ in trainer.asked]
        trainer.asked.clear()
    assert asked == [0, 2]


def test_no_more_than_so_many_minutes_pass_without_a_checkpoint(trainer: Any, monkeypatch: Any) -> None:
    now = 0.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    hook, asked = attached(trainer, every_minutes=1), []
    now = 1000.0  # built long before
    hook.before_train(TrainBegin(update=0, updates=None, resumed=False))
    for update in range(1, 10):
        now += 20
        hook.after_update(UpdateEnd(update=update, committed=True, num_samples=1))
        if trainer.asked:
            asked.append(update)
            hook.after_save(SaveEnd(update=update, path=Path("x") if update != 3 else None))
            trainer.asked.clear()
        if update == 5:
            hook.after_save(SaveEnd(update=update, path=Path("x")))  # another one's wish
    assert asked == [3, 8]  # the one that failed is not asked for again at once


def test_no_period_is_an_error() -> None:
    with refused(ArgumentError, "Save"):
        Save()
