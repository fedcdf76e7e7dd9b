from typing import Any

from evenstep.errors import ArgumentError
from evenstep.events import Bus, EpochEnd, Evaluate, UpdateEnd
from refused import refused


def attached(trainer: Any, **arguments: Any) -> Evaluate:
    hook = Evaluate(**arguments)
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
    hook, asked = attached(trainer, every_epochs=2), []
    for epoch, complete in [(0, True), (1, False), (1, True), (2, True), (3, True)]:
        hook.after_epoch(EpochEnd(update=10 * epoch, epoch=epoch, complete=complete))
        asked += [epoch for _ in trainer.asked]
        trainer.asked.clear()
    assert asked == [1, 3]


def test_no_period_is_an_error() -> None:
    with refused(ArgumentError, "Evaluate"):
        Evaluate()


def test_before_its_first_update_it_asks_for_nothing(trainer: Any) -> None:
    hook, asked = attached(trainer, every_updates=2, every_epochs=1, from_update=6), []
    for update in range(1, 10):
        hook.after_update(UpdateEnd(update=update, committed=True, num_samples=1))
        if update % 3 == 0:
            hook.after_epoch(EpochEnd(update=update, epoch=update // 3 - 1))
        asked += [update for _ in trainer.asked]
        trainer.asked.clear()
    assert asked == [6, 6, 8, 9]
