"""Buffers that forwards change: equal on all ranks after each update, as in one process where that can be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kit
from evenstep import Ema, Training
from evenstep.parallel import Ddp
from evenstep.parallel.buffers import SharedBuffers
from evenstep.train.update.rollback import Buffers

OnRanks = Callable[..., list[Any]]


class Counts(nn.Module):
    """Counts its forwards in a buffer, and uses the count."""

    def __init__(self, *, persistent: bool = True, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaces:
            self.seen = self.seen + 1
        elif self.training:
            self.seen += 1
        return x * (1 + 0.01 * self.seen)


def state_of(made: nn.Module, strategy: Any) -> dict[str, Any]:
    train = Training(ema=Ema(decay=0.5))
    trainer = kit.trainer_of(made, strategy=strategy, updates=4, data=kit.data(size=6, micro=2), train=train)
    trainer.train()
    return trainer.state_dict()


def check_equal(states: list[dict[str, Any]]) -> None:
    for part in ("model", "ema"):
        for name, value in states[0][part].items():
            assert all(torch.equal(value, other[part][name]) for other in states[1:]), (part, name)


@pytest.mark.parametrize(("strategy", "ranks"), [(partial(Ddp, reduction="fast"), 2), (Ddp, 3)])
def test_batch_norm_with_momentum_none_averages_all_micro_batches_of_all_ranks(
    on_ranks: OnRanks, strategy: Any, ranks: int
) -> None:
    """Three micro-batches per update, so that ranks have unequal numbers of them."""
    wanted = state_of(kit.net(nn.BatchNorm1d(5, momentum=None)), None)["model"]
    states = on_ranks(ranks, lambda group: state_of(kit.net(nn.BatchNorm1d(5, momentum=None)), strategy(group)))
    check_equal(states)
    got = states[0]["model"]
    assert got["2.num_batches_tracked"] == wanted["2.num_batches_tracked"] == 12
    for name in ("2.running_mean", "2.running_var"):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)


def norm_of_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5, dtype=torch.float64)), nn.Tanh())


@pytest.mark.parametrize(
    "part", [Counts, norm_of_weights, lambda: Counts(replaces=True), lambda: Counts(persistent=False)]
)
def test_buffers_that_the_output_depends_on_are_equal_on_all_ranks(on_ranks: OnRanks, part: Any) -> None:
    def act(group: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        made = kit.net(part())
        return state_of(made, Ddp(group)), {name: one.clone() for name, one in made.named_buffers()}

    (state, own), (other_state, other) = on_ranks(2, act)
    check_equal([state, other_state])
    assert own and all(torch.equal(own[name], other[name]) for name in own)


def test_a_replaced_buffer_is_averaged_and_rolled_back_like_a_changed_buffer() -> None:
    changed, replaced = (state_of(kit.net(Counts(replaces=replaces)), None) for replaces in (False, True))
    check_equal([changed, replaced])
    made = kit.net(Counts(replaces=True))
    buffers, kept = Buffers(made), made[2].seen
    made(torch.ones(1, 3).double())
    assert made[2].seen is not kept
    buffers.restore(1.0)
    assert made[2].seen is kept and kept == 0
    with buffers.unchanged():
        made(torch.ones(1, 3).double())
    assert made[2].seen is kept and kept == 0 and not buffers.moved(kept)


def test_a_buffer_that_only_another_rank_moves_is_taken_from_it(on_ranks: OnRanks) -> None:
    def act(group: Any) -> list[float]:
        counts = Counts()
        kept, shared = Buffers(counts), SharedBuffers(counts, group)
        seen: list[float] = []
        for _ in range(3):
            if group.rank == 1:
                counts(torch.ones(1))
            shared.share(kept)
            kept.restore(0.0)
            seen.append(float(counts.seen))
        return seen

    assert on_ranks(3, act) == [[1.0, 2.0, 3.0]] * 3
