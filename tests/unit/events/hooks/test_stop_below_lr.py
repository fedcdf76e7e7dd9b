from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Loss, MapData, Task, Trainer
from evenstep.events import Bus, StopBelowLr, UpdateEvent
from evenstep.optim.schedules import Linear

POINTS = [(torch.tensor([float(n)]), torch.tensor([2.0 * n])) for n in range(8)]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(((output - batch[1]) ** 2).sum())


def trainer_of(folder: Path | None = None, lr: float = 0.35e-3, updates: int = 10, **more: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data=MapData(POINTS, global_batch_size=4),
        updates=updates,
        lr_schedule=Linear(warmup_updates=2),
        folder=folder,
        hooks=[StopBelowLr(lr)],
        device="cpu",
        **more,
    )


def ends_at(lr: float, updates: int) -> int:
    """The first update with a rate below `lr` that does not rise."""
    rates = [1e-3 * Linear(warmup_updates=2)(update, updates) for update in range(1, updates + 1)]
    return next(n for n in range(2, updates + 1) if rates[n - 1] < lr and rates[n - 1] <= rates[n - 2])


def test_a_run_ends_where_its_rate_has_fallen_below_the_number_but_not_in_its_warmup() -> None:
    result = trainer_of(lr=0.6e-3).train()
    expected = ends_at(0.6e-3, 10)
    assert 2 < expected < 10
    assert (result.update, result.outcome) == (expected, "stopped")
    assert result.reason.startswith("the learning rate has fallen to 0.0005") and "below 0.0006" in result.reason


def test_a_resumed_run_stops_again_at_once_and_says_why(tmp_path: Path) -> None:
    first = trainer_of(tmp_path).train()
    again = trainer_of(tmp_path)
    again.resume("auto")
    result = again.train()
    assert (result.update, result.outcome, result.reason) == (first.update, "stopped", first.reason)


@pytest.mark.parametrize(
    ("more", "reset", "update"),
    [({"lr": 0.01e-3}, (), 10), ({"updates": 30}, (), ends_at(0.35e-3, 30)), ({}, "lr_schedule", 10)],
    ids=["a lower number", "a longer schedule", "a schedule that begins afresh"],
)
def test_a_resumed_run_goes_on_where_the_rate_is_enough(more: Any, reset: Any, update: int, tmp_path: Path) -> None:
    first = trainer_of(tmp_path / "first").train()
    again = trainer_of(tmp_path / "again", **more)
    again.resume(tmp_path / "first", reset=reset)
    result = again.train()
    assert result.update > first.update
    assert result.update == update


def test_the_largest_rate_of_the_groups_counts(trainer: Any) -> None:
    hook = StopBelowLr(0.1)
    Bus([hook], trainer)
    trainer.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.01})
    for update, rate in enumerate([0.2, 0.1, 0.05], 1):
        assert trainer.asked == []
        trainer.optimizer.param_groups[0]["lr"] = rate
        hook.after_update(UpdateEvent(update=update, committed=True, num_samples=1))
    assert trainer.asked == ["stop: the learning rate has fallen to 0.05, below 0.1"]
