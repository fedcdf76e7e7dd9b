"""Triangular against PyTorch's CyclicLR."""

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR

from evenstep.optim.schedules import Triangular


@pytest.mark.parametrize(("mode", "shrink"), [("triangular", 1.0), ("triangular2", 0.5)])
def test_it_is_that_of_pytorch_whose_count_begins_at_0(mode: str, shrink: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = CyclicLR(optimizer, base_lr=0.2, max_lr=1.0, step_size_up=5, mode=mode, cycle_momentum=False)
    expected: list[float] = []
    for _ in range(40):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    schedule = Triangular(period_updates=10, low_factor=0.2, shrink=shrink)
    assert [schedule(update, None) for update in range(1, 41)] == pytest.approx(expected, rel=1e-12)


def test_the_full_rate_is_exactly_in_the_middle_of_a_cycle() -> None:
    schedule = Triangular(period_updates=10)
    assert schedule(5, None) == schedule(15, None) == schedule(5 + 10**10, None) == 1
