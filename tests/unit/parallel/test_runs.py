"""Runs on several ranks, as threads, with the bits of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kit
from evenstep import Ema, MapData, Mixture, Training
from evenstep.checkpoint import CheckpointReader
from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Uncertainty
from evenstep.data import RoundRobin
from evenstep.parallel import Ddp, Group, Strategy, Zero1
from same import assert_same


@given(
    samples=st.integers(1, 23),
    size=st.integers(1, 3),
    blocks=st.integers(1, 9),
    ranks=st.integers(2, 5),
    kind=st.sampled_from([Ddp, Zero1]),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parameters_have_the_bits_of_one_process_for_any_cut_and_blocks(
    on_ranks: Any, samples: int, size: int, blocks: int, ranks: int, kind: Any
) -> None:
    """Some samples weigh nothing: micro-batches of these alone are not run."""

    def trained(strategy: Strategy) -> Tensor:
        model = kit.net()
        data = MapData(kit.samples(samples) * 2, global_batch_size=samples, micro_batch_size=size, shuffle=False)
        train = Training(clip_norm=0.1)
        kit.trainer_of(model, task=kit.Weighted(), data=data, updates=2, strategy=strategy, train=train).train()
        return kit.flat(model)

    alone = trained(Ddp(Group(), blocks=blocks))
    for ours in on_ranks(ranks, lambda group: trained(kind(group, blocks=blocks))):
        assert torch.equal(ours, alone)


SIZES = {"a": 6, "b": 4, "c": 2}


def mixture(micro: int = 2, **more: Any) -> Mixture:
    sets = {
        name: MapData(kit.samples(24, seed), global_batch_size=size, micro_batch_size=min(micro, size))
        for seed, (name, size) in enumerate(SIZES.items())
    }
    return Mixture(sets, **more)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "all in each": dict,
    "one micro-batch per task": lambda: {"data": mixture(6)},
    "one task at a time, ranks without work": lambda: {"data": mixture(6, mixing=RoundRobin())},
    "uncertainty": lambda: {"train": Training(coefficients=Uncertainty(regression=("a",)))},
    "PCGrad": lambda: {"train": Training(clip_norm=1.0, combine=PcGrad())},
    "Aligned-MTL": lambda: {"train": Training(clip_norm=1.0, combine=AlignedMtl())},
    "GradNorm": lambda: {"train": Training(clip_norm=1.0, combine=GradNorm())},
}


@pytest.mark.parametrize(("case", "ranks"), [*((case, 2) for case in CASES), ("PCGrad", 4)])
def test_the_update_is_that_of_one_process(on_ranks: Any, case: str, ranks: int) -> None:
    def act(group: Any) -> dict[str, Tensor]:
        model = kit.heads(*SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        given = {"data": mixture(), "train": Training(clip_norm=1.0), **CASES[case]()}
        task = {name: kit.Regress(name) for name in SIZES}
        trainer = kit.trainer_of(model, task=task, optimizer=optimizer, updates=4, strategy=Ddp(group), **given)
        trainer.train()
        return {**model.state_dict(), "loss": torch.tensor(kit.history(trainer, "train/a/loss")[-1])}

    wanted, (first, *others) = act(Group()), on_ranks(ranks, act)
    for name, value in wanted.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6 if case == "GradNorm" else 0, atol=0)
        assert all(torch.equal(first[name], other[name]) for other in others), name


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


class Once(nn.Module):
    """Writes to a buffer in the fifth forward of this rank, long after buffers were first looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards == 5:
            self.seen += 1
        return x * (1 + self.seen)


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
    on_ranks: Any, strategy: Any, ranks: int
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
    "part", [Counts, norm_of_weights, Once, lambda: Counts(replaces=True), lambda: Counts(persistent=False)]
)
def test_buffers_that_the_output_depends_on_are_equal_on_all_ranks(on_ranks: Any, part: Any) -> None:
    def act(group: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        made = kit.net(part())
        return state_of(made, Ddp(group)), {name: one.clone() for name, one in made.named_buffers()}

    (state, own), (other_state, other) = on_ranks(2, act)
    check_equal([state, other_state])
    assert own and all(torch.equal(own[name], other[name]) for name in own)


def test_each_rank_writes_its_own_part_of_the_optimizers_state(on_ranks: Any, tmp_path: Path) -> None:
    def made(strategy: Strategy, **more: Any) -> Any:
        net = kit.net(nn.Linear(5, 5))
        return kit.trainer_of(net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), strategy=strategy, **more)

    def resumed(group: Group) -> Any:
        trainer = made(Zero1(group))
        trainer.resume(tmp_path)
        return trainer.state_dict()

    on_ranks(2, lambda group: made(Zero1(group), folder=tmp_path).train().update)
    stored = CheckpointReader(tmp_path).tensors
    files = {piece.file for name, one in stored.items() if name.endswith("exp_avg") for piece in one.pieces}
    assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}
    wanted = made(Ddp())
    wanted.train()
    for state in on_ranks(3, resumed):
        for part in ("model", "optimizer"):
            assert_same(state[part], wanted.state_dict()[part], part)
