"""Gradients that travel in 16 bits: how much is lost, and what is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Failures, MapData, Skip, Task, Trainer
from evenstep.errors import ArgumentError, NonFiniteError
from evenstep.parallel import Bf16, Compression, Ddp, Fp16

ROUNDOFF = {Bf16: 2.0**-8, Fp16: 2.0**-11}
SMALLEST = {Bf16: 0.0, Fp16: 2.0**-25}  # half a subnormal of the format; those of bfloat16 are below float32's normals


def of_rank(rank: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    spread = 10.0 ** torch.randint(-6, 3, (40,), generator=generator)
    return [torch.randn(40, generator=generator) * spread, torch.randn(7, generator=generator)]


@given(kind=st.sampled_from([Bf16, Fp16]), ranks=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sum_is_off_by_no_more_than_the_stated_bound(
    on_ranks: Callable[..., list[Any]], kind: type[Compression], ranks: int, seed: int
) -> None:
    """Beside the exact sum in float64; the sum of ranks is made in 16 bits, one addition after another."""

    def act(group: Any) -> Tensor:
        module = nn.ParameterList([torch.zeros(40), torch.zeros(7)])
        reducer = Ddp(group, compression=kind()).reducer(module)
        reducer.wrap()
        reducer.arm()
        for parameter, gradient in zip(module, of_rank(group.rank, seed), strict=True):
            parameter.grad = gradient
        reducer.reduce(ranks)
        return torch.cat([parameter.grad for parameter in module]).double()

    each = torch.stack([torch.cat(of_rank(rank, seed)) for rank in range(ranks)]).double()
    bound = ((1 + ROUNDOFF[kind]) ** ranks - 1) * each.abs().sum(0) + ranks * SMALLEST[kind]
    totals = on_ranks(ranks, act)
    assert all(torch.equal(total, totals[0]) for total in totals)  # replicas stay replicas
    assert ((totals[0] - each.sum(0)).abs() <= bound).all()
    assert not torch.equal(totals[0], each.float().sum(0).double())  # it does round


def test_half_as_many_bytes_travel(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any, compression: Compression) -> list[int]:
        module, bytes_sent = nn.Linear(50, 20), []
        reducer = Ddp(group, compression=compression).reducer(module)
        reducer.wrap()
        whole = group.sum

        def counted(tensor: Tensor) -> Any:
            bytes_sent.append(tensor.numel() * tensor.element_size())
            return whole(tensor)

        group.sum = counted
        reducer.arm()
        module(torch.ones(1, 50)).sum().backward()
        reducer.reduce(2)
        assert module.weight.grad is not None and module.weight.grad.dtype is torch.float32
        return bytes_sent

    assert on_ranks(2, lambda group: act(group, Compression())) == [[4 * 1020]] * 2
    assert on_ranks(2, lambda group: act(group, Bf16())) == [[2 * 1020]] * 2


class Line(Task):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output * self.factor).sum()


def train(group: Any, factor: float, non_finite: Any = "stop") -> Trainer:
    model = nn.Linear(1, 1)
    trainer = Trainer(
        model=model,
        task=Line(factor),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        data=MapData([(torch.ones(1),)] * 4, global_batch_size=2, micro_batch_size=1),
        updates=1,
        device="cpu",
        strategy=Ddp(group, compression=Fp16()),
        failures=Failures(non_finite=non_finite),
    )
    trainer.train()
    return trainer


def test_a_sum_beyond_the_range_of_fp16_is_seen_and_said(on_ranks: Callable[..., list[Any]]) -> None:
    """Each rank's gradient, 40000 of the 80000, is within the range: only their sum is not."""

    def act(group: Any) -> str:
        with pytest.raises(NonFiniteError) as raised:
            train(group, 80_000.0)
        return str(raised.value)

    for said in on_ranks(2, act):
        assert "the gradients of this update are finite, but as fp16" in said
        assert "set `parallel.compression` to bf16 or none" in said


def test_a_sum_within_the_range_is_applied(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(2, lambda group: train(group, 60_000.0).progress.update) == [1, 1]


def test_a_policy_that_skips_skips_it_on_all_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> None:
        with pytest.raises(NonFiniteError):  # every batch overflows, and so many in a row are too many
            train(group, 80_000.0, Skip(limit=3))

    on_ranks(2, act)


def test_gradients_of_another_kind_are_refused(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> None:
        with pytest.raises(ArgumentError, match="has parameters of complex64"):
            module = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
            Ddp(group, compression=Bf16()).reducer(module).wrap()

    on_ranks(1, act)
