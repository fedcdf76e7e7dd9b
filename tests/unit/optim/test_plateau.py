"""Plateau against PyTorch's ReduceLROnPlateau, and its memory."""

import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from evenstep.optim.schedules import Plateau


@pytest.mark.parametrize("seed", range(6))
def test_it_is_that_of_pytorch_whose_patience_is_one_less(seed: int) -> None:
    draw = random.Random(seed)
    mode = draw.choice(["min", "max"])
    patience, delta = draw.randint(1, 4), draw.choice([0.0, 0.05])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = ReduceLROnPlateau(
        optimizer,
        mode=mode,
        factor=0.5,
        patience=patience - 1,
        threshold=delta,
        threshold_mode="abs",
        min_lr=0.01,
        eps=0.0,
    )
    ours = Plateau(
        mode=mode,
        factor=0.5,
        patience_evaluations=patience,
        min_delta=delta,
        min_factor=0.01,
    )
    for update in range(1, 80):
        value = 1 + draw.random()
        theirs.step(value)
        ours.evaluated(value, update=update)
        assert ours(update, None) == optimizer.param_groups[0]["lr"]
    assert ours.state["multiplier"] < 1


def test_what_it_remembers_is_saved_and_taken_back() -> None:
    values = [1.0, 0.9, 0.95, 0.91, 0.8, 0.9, 0.9, 0.9, 0.9]
    whole, first = (Plateau(factor=0.5, patience_evaluations=3) for _ in range(2))
    for update, value in enumerate(values, start=1):
        whole.evaluated(value, update=update)
    for cut in range(len(values)):
        first.reset()
        for update, value in enumerate(values[:cut], start=1):
            first.evaluated(value, update=update)
        second = Plateau(factor=0.5, patience_evaluations=3)
        assert second.load_state_dict(first.state_dict()) == ""
        for update, value in enumerate(values[cut:], start=cut + 1):
            second.evaluated(value, update=update)
        assert second.state_dict() == whole.state_dict()


def test_a_memory_of_another_metric_is_reset_and_says_so() -> None:
    one, other = Plateau(patience_evaluations=1), Plateau(metric="valid/accuracy", mode="max")
    one.evaluated(1.0, update=1)
    one.evaluated(1.0, update=2)
    assert one(3, None) == 0.1
    said = other.load_state_dict(one.state_dict())
    assert "follows `valid/accuracy` (max) instead of `valid/loss` (min)" in said
    assert other(3, None) == 1 and other.state["best_value"] is None


def test_evaluations_in_the_warm_up_and_values_that_are_not_finite() -> None:
    schedule = Plateau(patience_evaluations=1, warmup_updates=4)
    for update in (1, 2, 3):
        schedule.evaluated(9.0 + update, update=update)
    assert schedule.state["best_value"] is None and schedule(2, None) == 0.5
    schedule.evaluated(5.0, update=4)
    schedule.evaluated(float("nan"), update=5)
    assert schedule.state["best_value"] == 5.0 and schedule(6, None) == 0.1
