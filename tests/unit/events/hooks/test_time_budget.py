import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Hook, MapData, Task, Trainer, Training
from evenstep.events import Bus, TimeBudget, TrainEvent, UpdateEvent
from evenstep.events.hooks import stops

TOTAL = "stop: the time budget of 10 minutes for all starts of the run is used up"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stops, "monotonic", made)
    return made


def begun(trainer: Any, state: dict[str, Any] | None = None, **arguments: Any) -> TimeBudget:
    hook = TimeBudget(**arguments)
    Bus([hook], trainer)
    if state:
        hook.load_state_dict(state)
    hook.before_train(TrainEvent(update=0, updates=9, resumed=bool(state)))
    return hook


def after(hook: TimeBudget, clock: Clock, minutes: float) -> None:
    clock.now += 60 * minutes
    hook.after_update(UpdateEvent(update=1, committed=True, num_samples=1))


def test_a_start_ends_to_be_run_again(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer, max_minutes=5)
    after(hook, clock, 4.9)
    assert trainer.asked == []
    after(hook, clock, 0.1)
    assert trainer.asked == ["stop: the time budget of 5 minutes is used up (requeue)"]


def test_the_time_of_all_starts_ends_the_run_for_good(trainer: Any, clock: Clock) -> None:
    first = begun(trainer, max_minutes=6, max_total_minutes=10)
    after(first, clock, 6)
    assert trainer.asked == ["stop: the time budget of 6 minutes is used up (requeue)"]
    state = first.state_dict()
    clock.now += 6000  # between the starts nothing counts
    trainer.asked.clear()
    second = begun(trainer, state, max_minutes=6, max_total_minutes=10)
    after(second, clock, 3.9)
    assert trainer.asked == []
    after(second, clock, 0.1)
    assert trainer.asked == [TOTAL]


def test_a_resumed_run_that_has_used_its_time_stops_at_once(trainer: Any, clock: Clock) -> None:
    begun(trainer, {"trained_s": 600.0}, max_total_minutes=10)
    assert trainer.asked == [TOTAL]


def test_a_run_that_goes_back_in_place_has_spent_its_time_once(trainer: Any, clock: Clock) -> None:
    hook = begun(trainer, {"trained_s": 60.0}, max_total_minutes=10)
    after(hook, clock, 3)
    saved = hook.state_dict()
    assert saved == {"trained_s": 240.0}
    after(hook, clock, 2)
    hook.load_state_dict(saved)
    assert hook.state_dict() == {"trained_s": 360.0}
    after(hook, clock, 3.9)
    assert trainer.asked == []
    after(hook, clock, 0.1)
    assert trainer.asked == [TOTAL]


class Minute(Task):
    """Each update takes a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self._clock.now += 60
        return (output - batch).square().sum()


class Killed(Hook):
    """Keeps what is left of the run folder if it is killed after update 7."""

    def __init__(self, left: Path) -> None:
        self._left = left

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 7:
            shutil.copytree(self.trainer.folder or "", self._left)


def test_the_time_of_starts_that_are_stopped_killed_and_resumed_is_the_sum_of_what_was_kept(
    tmp_path: Path, clock: Clock
) -> None:
    def trained(folder: Path, minutes: float, updates: int, *hooks: Hook) -> tuple[int, str]:
        model = nn.Linear(1, 1)
        one = Trainer(
            model=model,
            task=Minute(clock),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=MapData([torch.ones(1)] * 4, global_batch_size=1),
            updates=updates,
            device="cpu",
            folder=folder,
            hooks=[TimeBudget(max_total_minutes=minutes), *hooks],
            train=Training(check_loss=False),
            checkpoint=Checkpointing(every_updates=2, asynchronous=False),
        )
        one.resume("auto")
        result = one.train()
        clock.now += 1e6  # until somebody starts it again
        return result.update, result.reason

    first, left = tmp_path / "first", tmp_path / "left"
    assert trained(first, 10, 3)[0] == 3
    assert trained(first, 10, 8, Killed(left))[0] == 8  # killed in update 8: its minute and that of update 7 are lost
    assert trained(left, 10, 50) == (10, TOTAL.removeprefix("stop: "))  # 3 of the first, 3 of the second, and 4
    assert trained(left, 10, 50) == (10, TOTAL.removeprefix("stop: "))
    assert trained(left, 12, 50)[0] == 12
