"""Constant against PyTorch's LinearLR as a warm-up."""

import pytest
from torch.optim.lr_scheduler import LinearLR

from evenstep.optim.schedules import Constant


def test_it_is_the_linear_warm_up_of_pytorch_and_then_one(torch_factors):
    expected = torch_factors(lambda optimizer: LinearLR(optimizer, 1 / 5, 1.0, total_iters=4), 12)
    schedule = Constant(warmup_updates=5)
    assert [schedule(update, None) for update in range(1, 13)] == pytest.approx(expected, rel=1e-12)


def test_no_warm_up_begins_at_one():
    assert Constant()(1, None) == 1
