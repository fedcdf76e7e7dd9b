"""CosineRestarts against PyTorch's CosineAnnealingWarmRestarts, which neither warms up nor shrinks, and NumPy."""

import numpy as np
import pytest
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from evenstep.optim.schedules import CosineRestarts


@pytest.mark.parametrize(("period", "longer"), [(4, 1), (3, 2), (2, 3), (1, 1)])
def test_it_is_that_of_pytorch(torch_factors, period: int, longer: int) -> None:
    expected = torch_factors(
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=period, T_mult=longer, eta_min=0.1), 60
    )
    schedule = CosineRestarts(period_updates=period, period_factor=longer, end_factor=0.1)
    assert [schedule(update, None) for update in range(1, 61)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("longer", [1.0, 1.5, 2.0])
def test_periods_shrink_and_follow_a_warm_up(longer: float) -> None:
    expected = [0.25, 0.5, 0.75]
    length, height, left = 6.0, 1.0, 0.0
    while len(expected) < 100:
        inside = np.arange(np.ceil(left), np.ceil(left + length)) - left
        expected += (height * (0.05 + 0.95 * (1 + np.cos(np.pi * inside / length)) / 2)).tolist()
        left, length, height = left + length, length * longer, height * 0.5
    schedule = CosineRestarts(period_updates=6, period_factor=longer, shrink=0.5, warmup_updates=4, end_factor=0.05)
    assert [schedule(update, None) for update in range(1, 101)] == pytest.approx(expected[:100], rel=1e-9)


def test_a_period_begins_exactly_at_its_height_however_late() -> None:
    schedule = CosineRestarts(period_updates=10, period_factor=2, shrink=0.5)
    for number in range(12):
        assert schedule(1 + 10 * (2**number - 1), None) == 0.5**number
    assert CosineRestarts(period_updates=7)(1 + 7 * 10**9, None) == 1
