"""Linear against PyTorch's LinearLR, without and with a warm-up."""

import pytest
from torch.optim.lr_scheduler import LinearLR, SequentialLR

from evenstep.optim.schedules import Linear


@pytest.mark.parametrize("end_factor", [0.0, 0.25])
@pytest.mark.parametrize("warmup", [0, 1])
def test_it_is_the_linear_decay_of_pytorch(torch_factors, end_factor: float, warmup: int):
    expected = torch_factors(lambda optimizer: LinearLR(optimizer, 1.0, end_factor, total_iters=19), 20)
    schedule = Linear(warmup_updates=warmup, end_factor=end_factor)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_with_a_warm_up_it_is_the_two_in_sequence(torch_factors):
    def sequence(optimizer):
        warm = LinearLR(optimizer, 1 / 6, 1.0, total_iters=5)
        return SequentialLR(optimizer, [warm, LinearLR(optimizer, 1.0, 0.1, total_iters=14)], milestones=[5])

    schedule = Linear(warmup_updates=6, end_factor=0.1)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(torch_factors(sequence, 20), rel=1e-9)


def test_a_table():
    schedule = Linear(warmup_updates=2, end_factor=0.2)
    assert [schedule(update, 6) for update in range(1, 7)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
