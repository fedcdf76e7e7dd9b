"""Polynomial against PyTorch's PolynomialLR, which has no end factor, and a table that has."""

import numpy as np
import pytest
from torch.optim.lr_scheduler import PolynomialLR

from evenstep.optim.schedules import Linear, Polynomial


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5])
def test_it_is_the_polynomial_decay_of_pytorch(torch_factors, power: float):
    expected = torch_factors(lambda optimizer: PolynomialLR(optimizer, total_iters=19, power=power), 20)
    schedule = Polynomial(power=power, end_factor=0.0)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_table_with_warm_up_and_end_factor():
    left = np.linspace(1, 0, 16)
    expected = [0.2, 0.4, 0.6, 0.8, *(0.1 + 0.9 * left**2)]
    schedule = Polynomial(warmup_updates=5, power=2.0, end_factor=0.1)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(expected, rel=1e-12)


def test_power_one_is_linear():
    one, line = Polynomial(warmup_updates=3, end_factor=0.2), Linear(warmup_updates=3, end_factor=0.2)
    assert [one(update, 9) for update in range(1, 10)] == [line(update, 9) for update in range(1, 10)]
