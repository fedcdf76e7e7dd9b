"""Gradients that travel in 16 bits: how much is lost, and what is not."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.parallel import Ddp


def of_rank(rank: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    spread = 10.0 ** torch.randint(-6, 3, (40,), generator=generator)
    return [torch.randn(40, generator=generator) * spread, torch.randn(7, generator=generator)]


@given(ranks=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sum_is_off_by_no_more_than_the_stated_bound(
    on_ranks: Callable[..., list[Any]], ranks: int, seed: int
) -> None:
    """Beside the exact sum in float64; the sum of ranks is made in 16 bits, one addition after another."""

    def act(group: Any) -> Tensor:
        module = nn.ParameterList([torch.zeros(40), torch.zeros(7)])
        reducer = Ddp(group, reduction="fast", wire_dtype=torch.bfloat16).reducer(module)
        reducer.wrap()
        reducer.arm()
        for parameter, gradient in zip(module, of_rank(group.rank, seed), strict=True):
            parameter.grad = gradient
        reducer.reduce()
        return torch.cat([parameter.grad for parameter in module]).double()

    each = torch.stack([torch.cat(of_rank(rank, seed)) for rank in range(ranks)]).double()
    bound = ((1 + 2**-8) ** ranks - 1) * each.abs().sum(0)
    totals = on_ranks(ranks, act)
    assert all(torch.equal(total, totals[0]) for total in totals)  # replicas stay replicas
    assert ((totals[0] - each.sum(0)).abs() <= bound).all()
    assert not torch.equal(totals[0], each.float().sum(0).double())  # it does round


def test_half_as_many_bytes_travel(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any, wire_dtype: torch.dtype | None) -> list[int]:
        module, bytes_sent = nn.Linear(50, 20), []
        reducer = Ddp(group, reduction="fast", wire_dtype=wire_dtype).reducer(module)
        reducer.wrap()
        whole = group.sum

        def counted(tensor: Tensor) -> Any:
            bytes_sent.append(tensor.numel() * tensor.element_size())
            return whole(tensor)

        group.sum = counted
        reducer.arm()
        module(torch.ones(1, 50)).sum().backward()
        reducer.reduce()
        assert module.weight.grad is not None and module.weight.grad.dtype is torch.float32
        return bytes_sent

    assert on_ranks(2, lambda group: act(group, None)) == [[4 * 1020]] * 2
    assert on_ranks(2, lambda group: act(group, torch.bfloat16)) == [[2 * 1020]] * 2
