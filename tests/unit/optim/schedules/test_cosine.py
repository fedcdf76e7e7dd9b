"""Cosine against PyTorch's CosineAnnealingLR, without and with a warm-up."""

import pytest
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from evenstep.optim.schedules import Cosine


@pytest.mark.parametrize("end_factor", [0.0, 0.25])
def test_it_is_the_cosine_annealing_of_pytorch(torch_factors, end_factor: float):
    expected = torch_factors(lambda optimizer: CosineAnnealingLR(optimizer, T_max=19, eta_min=end_factor), 20)
    schedule = Cosine(end_factor=end_factor)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_with_a_warm_up_it_is_the_two_in_sequence(torch_factors):
    def sequence(optimizer):
        warm = LinearLR(optimizer, 1 / 6, 1.0, total_iters=5)
        return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, T_max=14, eta_min=0.1)], milestones=[5])

    schedule = Cosine(warmup_updates=6, end_factor=0.1)
    assert [schedule(update, 20) for update in range(1, 21)] == pytest.approx(torch_factors(sequence, 20), rel=1e-9)


def test_halfway_down_it_is_between_the_ends():
    assert Cosine(warmup_updates=1, end_factor=0.2)(51, 101) == pytest.approx(0.6)
