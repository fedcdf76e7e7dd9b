"""Who sets learning rates: the schedule, or somebody else, never both."""

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from evenstep.errors import ArgumentError
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.schedules import Constant, Linear, LrSchedule, PerGroup
from refused import refused


def sgd(*rates: float, **more: object) -> SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate, **more} for rate in rates]
    return SGD(groups)


def test_a_rate_set_elsewhere_is_refused_where_a_schedule_would_undo_it() -> None:
    optimizer = sgd(0.5, 0.1)
    rates = LearningRates(optimizer, Constant(), 10)
    assert rates(1) == [0.5, 0.1]
    optimizer.param_groups[1]["lr"] = 0.01
    with refused(ArgumentError, "lr_schedule"):
        rates(2)
    fresh = LearningRates(optimizer := sgd(0.5), Constant(), 10)
    optimizer.param_groups[0]["lr"] = 0.4  # also before the first update
    with refused(ArgumentError, "lr_schedule"):
        fresh(1)


def test_groups_that_share_the_tensor_of_their_rate_follow_schedules_of_their_own() -> None:
    """As torch lets them where `lr` is given as one tensor for all."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "name": name} for name in ("body", "head")]
    optimizer = SGD(groups, lr=torch.tensor(0.5))
    rates = LearningRates(optimizer, PerGroup({"head": Linear(warmup_updates=2)}, Constant()), 4)
    for update, head in ((1, 0.25), (2, 0.5)):
        assert rates(update) == [0.5, head] == [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("given", [math.nan, -0.5])
@pytest.mark.parametrize("per_group", [False, True])
def test_what_is_no_multiplier_is_refused_before_a_rate_is_set(given: Any, per_group: bool) -> None:
    class Own(LrSchedule):
        def __call__(self, update: int, updates: int | None) -> float:
            return given if update == 2 else 1  # a whole number is one, too

        def check(self, updates: int | None) -> None: ...

    optimizer = sgd(0.5)
    rates = LearningRates(optimizer, PerGroup({"0": Own()}, Constant()) if per_group else Own(), 4)
    assert rates(1) == [0.5]
    with refused(ArgumentError, "lr_schedule"):
        rates(2)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rate_that_comes_from_a_checkpoint_is_nobodys_change() -> None:
    optimizer = sgd(0.5)
    rates = LearningRates(optimizer, Linear(warmup_updates=4), 8)
    rates(4)
    optimizer.param_groups[0]["lr"] = 0.125  # as of update 1
    rates.reloaded(0)
    assert rates(2) == [0.25]


def test_each_groups_rate_is_a_metric_by_the_groups_name_or_number() -> None:
    assert LearningRates(sgd(0.5), None, 1).names == ["train/lr"]
    assert LearningRates(sgd(0.5, 0.1), None, 1).names == ["train/lr", "train/lr/1"]
    named = SGD([{"params": [torch.zeros(1, requires_grad=True)], "name": name} for name in ("body", "head")], lr=1)
    assert LearningRates(named, None, 1).names == ["train/lr", "train/lr/head"]
    assert LearningRates(sgd(1, 1, 1, name="same"), None, 1).names == ["train/lr", "train/lr/1", "train/lr/2"]
