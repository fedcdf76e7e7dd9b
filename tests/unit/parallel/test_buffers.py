"""Buffers that forwards change: equal on all ranks after each update, as in one process where that can be."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Engine, Hook, MapData, Task, Trainer, Training
from evenstep.parallel import Ddp, Ordered
from evenstep.parallel.buffers import SharedBuffers
from evenstep.train.buffers import Buffers

OnRanks = Callable[..., list[Any]]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


class Heard(Hook):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_incident(self, event: Any) -> None:
        if event.kind == "dependence":
            self.messages.append(event.message)


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


def model(part: nn.Module) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 8), part, nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(0)  # torch's own is shared by the threads
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return made


def points(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn((), generator=generator)) for _ in range(count)]


def trainer(
    made: nn.Module, strategy: Any, *, updates: int = 4, size: int = 6, hooks: Any = (), task: Task | None = None
) -> Trainer:
    return Trainer(
        model=made,
        task=task or Square(),
        optimizer=torch.optim.SGD(made.parameters(), lr=0.01),
        data=MapData(points(), global_batch_size=size, micro_batch_size=2),
        updates=updates,
        device="cpu",
        strategy=strategy,
        train=Training(ema=Ema(decay=0.5)),
        hooks=hooks,
    )


def state_of(made: nn.Module, strategy: Any, **more: Any) -> dict[str, Any]:
    one = trainer(made, strategy, **more)
    one.train()
    return one.state_dict()


def check_equal(states: list[dict[str, Any]]) -> None:
    for part in ("model", "ema"):
        for name, value in states[0][part].items():
            assert all(torch.equal(value, other[part][name]) for other in states[1:]), (part, name)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", [Ddp, Ordered])
def test_batch_norm_with_momentum_none_averages_all_micro_batches_of_all_ranks(
    on_ranks: OnRanks, strategy: Any, ranks: int
) -> None:
    """Three micro-batches per update, so that ranks have unequal numbers of them."""
    wanted = state_of(model(nn.BatchNorm1d(8, momentum=None)), None)["model"]
    states = on_ranks(ranks, lambda group: state_of(model(nn.BatchNorm1d(8, momentum=None)), strategy(group)))
    check_equal(states)
    got = states[0]["model"]
    assert got["1.num_batches_tracked"] == wanted["1.num_batches_tracked"] == 12
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_counters_of_batch_norm_count_the_micro_batches_of_all_ranks(on_ranks: OnRanks) -> None:
    states = on_ranks(2, lambda group: state_of(model(nn.BatchNorm1d(8)), Ddp(group)))
    check_equal(states)
    assert states[0]["model"]["1.num_batches_tracked"] == 12


def test_statistics_that_do_not_move_keep_their_bits_on_three_ranks(on_ranks: OnRanks) -> None:
    def act(group: Any) -> tuple[Tensor, Tensor]:
        norm = nn.BatchNorm1d(64)
        norm.running_mean.copy_(torch.rand(64, generator=torch.Generator().manual_seed(1)))
        before, kept = norm.running_mean.clone(), Buffers(norm)
        SharedBuffers(norm, group).share(kept)
        return before, norm.running_mean

    for before, after in on_ranks(3, act):
        assert torch.equal(before, after)


def norm_of_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


@pytest.mark.parametrize(
    "part", [Counts, norm_of_weights, lambda: Counts(replaces=True), lambda: Counts(persistent=False)]
)
def test_buffers_that_the_output_depends_on_are_equal_on_all_ranks(on_ranks: OnRanks, part: Any) -> None:
    def act(group: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        made = model(part())
        return state_of(made, Ordered(group)), {name: one.clone() for name, one in made.named_buffers()}

    (state, own), (other_state, other) = on_ranks(2, act)
    check_equal([state, other_state])
    assert own and all(torch.equal(own[name], other[name]) for name in own)


def test_a_run_with_buffers_that_the_output_depends_on_is_resumed_to_the_same_bits_on_two_ranks(
    on_ranks: OnRanks,
) -> None:
    def act(group: Any) -> list[dict[str, Any]]:
        whole = state_of(model(nn.Sequential(Counts(), nn.BatchNorm1d(8, momentum=None))), Ordered(group), updates=6)
        half = state_of(model(nn.Sequential(Counts(), nn.BatchNorm1d(8, momentum=None))), Ordered(group), updates=3)
        again = trainer(model(nn.Sequential(Counts(), nn.BatchNorm1d(8, momentum=None))), Ordered(group), updates=6)
        saved = group.gather(half)[0]  # a checkpoint holds what the first rank has
        again.load_state_dict(saved)
        again.train()
        return [whole, again.state_dict()]

    for whole, again in on_ranks(2, act):
        check_equal([whole, again])


def test_buffers_that_move_are_said_once_by_name_and_static_ones_are_not() -> None:
    def said(part: nn.Module, **more: Any) -> list[str]:
        heard = Heard()
        trainer(model(part), None, hooks=[heard], **more).train()
        return heard.messages

    [moving] = said(Counts())
    assert "forwards change the buffer `1.seen`, of which only the model knows what it means" in moving
    assert len(said(Counts(persistent=False))) == 2
    assert "which no checkpoint holds (`persistent=False`)" in said(Counts(persistent=False))[1]
    assert said(nn.BatchNorm1d(8)) == said(nn.Tanh()) == []


def test_a_buffer_that_a_forward_replaces_is_averaged_and_taken_back_like_one_that_it_changes() -> None:
    changed, replaced = (state_of(model(Counts(replaces=replaces)), None) for replaces in (False, True))
    check_equal([changed, replaced])
    made = model(Counts(replaces=True))
    buffers, kept = Buffers(made), made[1].seen
    made(torch.ones(1, 4))
    assert made[1].seen is not kept
    buffers.restore(1.0)
    assert made[1].seen is kept and kept == 0
    with buffers.unchanged():
        made(torch.ones(1, 4))
    assert made[1].seen is kept and kept == 0 and not buffers.moved(kept)


def test_a_table_that_a_forward_makes_longer_goes_on_working() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.table) < x.shape[-1]:
                self.table = torch.arange(1.0, 1 + x.shape[-1])
            return x * self.table[: x.shape[-1]]

    made = model(Table())
    state_of(made, None)
    assert len(made[1].table) == 8


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


class Teaches(nn.Module):
    """Moves frozen numbers with each forward, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.taught = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.taught.lerp_(x.mean(0), 0.5)
        return x + self.taught


def test_frozen_parameters_that_forwards_move_are_equal_on_ranks_of_which_one_has_less_to_do(
    on_ranks: OnRanks,
) -> None:
    def act(group: Any) -> list[Tensor]:
        made = model(Teaches())
        pairs = points(9)
        optimizer = torch.optim.SGD([one for one in made.parameters() if one.requires_grad], lr=0.01)
        engine = Engine(made, Square(), optimizer, strategy=Ddp(group), device="cpu")
        seen = list[Tensor]()
        for update in range(4):
            batches = [tuple(map(torch.stack, zip(*pairs[n : n + 3], strict=True))) for n in (0, 3, 6)]
            if update == 3:  # an aborted one leaves it as it was, everywhere
                batches[0][0][0] = torch.nan
            engine.update(*(batches[:2] if group.rank == 0 else batches[2:]))
            seen.append(made[1].taught.detach().clone())
        return seen

    first, second = on_ranks(2, act)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(first[1], first[2])
    torch.testing.assert_close(first[2], first[3], rtol=0, atol=0)


class Cools(nn.Module):
    """Has a temperature in a plain attribute, which each forward in training lowers, and a count beside it."""

    def __init__(self, *, lowers: bool = True, p: float = 0.5) -> None:
        super().__init__()
        self.lowers, self.temperature, self.calls, self.last, self.drop = lowers, 1.0, 0, None, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()
        if self.training and self.lowers:
            self.temperature *= 0.99
        return self.drop(x * self.temperature)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_attribute_that_forwards_change_is_said_where_the_loss_depends_on_it(on_ranks: OnRanks, ranks: int) -> None:
    def act(group: Any) -> list[str]:
        heard = Heard()
        cools = Cools(p=0.5 if ranks == 1 else 0.0)  # ranks that are threads share torch's generator
        trainer(model(cools), Ddp(group), hooks=[heard]).train()
        return heard.messages

    for rank, said in enumerate(on_ranks(ranks, act)):
        assert len(said) == (rank == 0)
        for text in said:
            assert text.startswith("forwards or losses change `temperature` of `1` (1 → 0.9")
            assert "no checkpoint holds it" in text and "`calls`" not in text


@pytest.mark.parametrize(
    "own",
    [
        torch.Generator(),
        np.random.default_rng(1),
        np.random.RandomState(1),
        random.Random(1),
        set[float](),
        Counter[int](),
    ],
    ids=lambda own: type(own).__name__,
)
def test_a_generator_or_a_set_of_ones_own_on_which_the_loss_depends_is_said_as_well(own: Any) -> None:
    class Draws(nn.Module):
        own: Any

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.own, torch.Generator):
                return x * torch.rand((), generator=self.own)
            if isinstance(self.own, Counter):
                self.own["passes"] += 1
                return x / self.own["passes"]
            if isinstance(self.own, set):
                self.own.add(len(self.own))
                return x / len(self.own)
            return x * self.own.uniform(1, 2)

    draws, heard = Draws(), Heard()
    draws.own = own
    trainer(model(draws), None, hooks=[heard]).train()
    assert len(heard.messages) == 1 and heard.messages[0].startswith("forwards or losses change `own` of `1`")
    is_generator = not isinstance(own, set | Counter)
    assert heard.messages[0].endswith("own are seeded for each micro-batch.") == is_generator


def test_attributes_on_which_no_loss_depends_are_left_alone_and_nothing_is_said() -> None:
    class Drops(Cools):
        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x)

    heard = Heard()
    check_equal([state_of(model(Cools(lowers=False)), None, hooks=[heard]), state_of(model(Drops()), None)])
    assert not heard.messages


def test_numbers_that_follow_the_update_as_is_advised_are_no_fault() -> None:
    made, heard = model(Cools(lowers=False)), Heard()

    class Follows(Square):
        def after_update(self, event: Any) -> None:
            made.get_submodule("1").temperature = 0.99**event.update

        def loss(self, output: Any, batch: Any) -> Tensor:
            self.share = 1 / self.now.update
            return super().loss(output, batch) * self.share

    trainer(made, None, hooks=[heard], task=Follows()).train()
    assert not heard.messages
