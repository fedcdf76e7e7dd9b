"""Who sets learning rates: the schedule, or somebody else, never both."""

import pytest
import torch
from torch.optim import SGD

from evenstep.errors import ArgumentError
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.schedules import Constant, Linear


def sgd(*rates: float, **more: object) -> SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate, **more} for rate in rates]
    return SGD(groups)


def test_without_a_schedule_rates_are_left_as_they_are_set() -> None:
    optimizer = sgd(0.5)
    rates = LearningRates(optimizer, None, 10)
    assert rates(1) == [0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    assert rates(2) == [0.25] and optimizer.param_groups[0]["lr"] == 0.25


def test_a_rate_that_somebody_else_has_set_is_refused_by_name_where_a_schedule_would_undo_it() -> None:
    optimizer = sgd(0.5, 0.1)
    rates = LearningRates(optimizer, Constant(), 10)
    assert rates(1) == [0.5, 0.1]
    optimizer.param_groups[1]["lr"] = 0.01
    with pytest.raises(
        ArgumentError, match=r"group 1 of the optimizer is 0.01 before update 2.*`lr_schedule` Constant"
    ):
        rates(2)
    fresh = LearningRates(optimizer := sgd(0.5), Constant(), 10)
    optimizer.param_groups[0]["lr"] = 0.4  # also before the first update
    with pytest.raises(ArgumentError, match="no effect"):
        fresh(1)


def test_a_rate_in_a_tensor_is_watched_without_being_read() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=torch.tensor(0.5))
    rates = LearningRates(optimizer, Linear(warmup_updates=2), 4)
    assert rates(1) == [0.25] and rates(2) == [0.5]
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    optimizer.param_groups[0]["lr"].mul_(0.5)
    with pytest.raises(ArgumentError, match="group 0"):
        rates(3)


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


def test_a_group_without_a_rate_is_refused_only_where_a_schedule_would_multiply_it() -> None:
    optimizer = sgd(0.5)
    del optimizer.param_groups[0]["lr"]
    assert LearningRates(optimizer, None, 1)(1) == []
    with pytest.raises(ArgumentError, match="group 0 of the optimizer has no `lr`"):
        LearningRates(optimizer, Constant(), 1)
