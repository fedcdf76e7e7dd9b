"""The outer step at the border where the inner learning rate has fallen to 0."""

import pytest
import torch

from evenstep.parallel.outer import Outer


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_share_at_a_rate_of_0_is_the_limit_of_shares_at_rates_that_fall_towards_it(nesterov: bool) -> None:
    """A schedule that ends at 0 may do so in an update that shares; the ranks have moved in those before it."""
    outer = Outer(outer_lr=0.9, outer_momentum=0.6, by_inner_rate=True, nesterov=nesterov)
    ends, momenta = list[torch.Tensor](), list[torch.Tensor]()
    for rate in (1e-12, 0.0):
        shared, momentum = torch.tensor([1.0, -2.0]).double(), torch.tensor([3.0, 0.5]).double()
        outer.step(shared, torch.tensor([0.5, -1.0]).double(), momentum, rate=rate)
        ends.append(shared)
        momenta.append(momentum)
    assert torch.allclose(ends[1], ends[0], rtol=0, atol=1e-11)
    step = 0.9 * (1.6 if nesterov else 1.0)
    assert ends[1].tolist() == pytest.approx([1.0 - step * 0.5, -2.0 + step * 1.0], abs=1e-15)
    assert momenta[1].tolist() == pytest.approx([1.8, 0.3])
