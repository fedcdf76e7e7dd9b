"""Local SGD, BMUF, SlowMo and DiLoCo against references of a few lines in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import evenstep
import kit
from evenstep.contrib.local_sgd import LocalSgd
from evenstep.errors import ArgumentError
from evenstep.parallel import Single
from refused import refused

LR = 0.05
EVERY = 3
SAMPLES = 48
BATCH = 8
POINTS = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS = [(point, point.sum().sin()) for point in POINTS]


def trainer_of(group: Any, hooks: Any, *, optimizer: Any = torch.optim.SGD, **more: Any) -> evenstep.Trainer:
    model = kit.line()
    data = evenstep.MapData(ROWS, global_batch_size=BATCH, micro_batch_size=2, shuffle=False)
    more = {"updates": 12, "strategy": Single(group), **more}
    return kit.trainer_of(model, *hooks, optimizer=optimizer(model.parameters(), lr=LR), data=data, **more)


def flat(trainer: evenstep.Trainer) -> Tensor:
    return kit.flat(trainer.model)


def on_each(ranks: int, updates: int) -> list[list[Tensor]]:
    """For each rank the samples of its micro-batches, by update."""
    batches = [range(begin, begin + BATCH) for begin in range(0, SAMPLES, BATCH)]
    told: list[list[Tensor]] = [[] for _ in range(ranks)]
    for update in range(updates):
        samples = batches[update % len(batches)]
        microbatches = [samples[begin : begin + 2] for begin in range(0, BATCH, 2)]
        for rank in range(ranks):
            own = microbatches[rank * len(microbatches) // ranks : (rank + 1) * len(microbatches) // ranks]
            told[rank].append(torch.tensor([sample for one in own for sample in one]))
    return told


def by_hand(ranks: int, step: Callable[..., tuple[Tensor, Tensor]], *, updates: int = 12) -> Tensor:
    """Each rank makes steps of SGD on its own samples; every H updates `step` gives θ and v from θ, Δ and v."""
    shared = kit.flat(kit.line()).clone()
    own = [shared.clone() for _ in range(ranks)]
    velocity = torch.zeros_like(shared)
    samples = on_each(ranks, updates)
    targets = torch.stack([target for _, target in ROWS])
    for update in range(1, updates + 1):
        for rank, theta in enumerate(own):
            chosen = samples[rank][update - 1]
            inputs = torch.cat([POINTS[chosen], torch.ones(len(chosen), 1, dtype=torch.float64)], dim=1)
            theta -= LR * 2 * inputs.T @ (inputs @ theta - targets[chosen]) / len(chosen)
        if update % EVERY == 0:
            shared, velocity = step(shared, shared - torch.stack(own).mean(0), velocity)
            own = [shared.clone() for _ in range(ranks)]
    return shared


def bmuf(theta: Tensor, delta: Tensor, v: Tensor, *, nesterov: bool) -> tuple[Tensor, Tensor]:
    v = 0.75 * v + 0.9 * delta
    theta = theta - v
    return (theta - 0.75 * v if nesterov else theta), v


def slowmo(theta: Tensor, delta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.5 * v + delta / LR
    return theta - 0.8 * LR * v, v


def diloco(theta: Tensor, delta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.9 * v + delta
    return theta - 0.7 * (delta + 0.9 * v), v


METHODS: dict[str, tuple[Callable[[], LocalSgd], Callable[..., tuple[Tensor, Tensor]]]] = {
    "local SGD": (lambda: LocalSgd(EVERY), lambda theta, delta, v: (theta - delta, v)),
    "BMUF": (
        lambda: LocalSgd.bmuf(EVERY, momentum=0.75, lr=0.9),
        lambda theta, delta, v: bmuf(theta, delta, v, nesterov=False),
    ),
    "Nesterov's BMUF": (
        lambda: LocalSgd.bmuf(EVERY, momentum=0.75, lr=0.9, nesterov=True),
        lambda theta, delta, v: bmuf(theta, delta, v, nesterov=True),
    ),
    "SlowMo": (lambda: LocalSgd.slowmo(EVERY, momentum=0.5, lr=0.8), slowmo),
    "DiLoCo": (lambda: LocalSgd.diloco(EVERY), diloco),
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in METHODS), ("DiLoCo", 4)])
def test_each_method_is_its_reference(name: str, ranks: int, on_ranks: Any) -> None:
    hook, step = METHODS[name]

    def act(group: Any) -> Tensor:
        trainer = trainer_of(group, [hook()])
        trainer.train()
        return flat(trainer)

    first, *others = on_ranks(ranks, act)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, by_hand(ranks, step), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "stop"), [("local SGD", 6), ("DiLoCo", 4)])
def test_a_run_goes_on_with_the_same_bits(name: str, stop: int, tmp_path: Path, on_ranks: Any) -> None:
    hook, _ = METHODS[name]

    def act(group: Any) -> list[Tensor]:
        def made(**more: Any) -> evenstep.Trainer:
            train = evenstep.Training(ema=evenstep.Ema(decay=0.5))
            return trainer_of(group, [hook()], optimizer=torch.optim.AdamW, train=train, **more)

        straight = made()
        straight.train()
        first = made(updates=stop, folder=tmp_path / "run")
        first.train()
        second = made(folder=tmp_path / "run")
        second.resume()
        second.train()
        third = made()
        third.load_state_dict(second.state_dict())
        assert torch.equal(flat(third), flat(second))
        return [flat(straight), flat(second)]

    for straight, resumed in on_ranks(2, act):
        assert torch.equal(straight, resumed)


@pytest.mark.parametrize(
    ("hooks", "more"),
    [
        ([], {}),
        ([LocalSgd(2)], {"failures": evenstep.Failures(non_finite="skip")}),
        ([LocalSgd(2)], {"precision": "16-mixed"}),
    ],
)
def test_ranks_that_would_go_different_ways_are_refused(hooks: list[Any], more: Any, on_ranks: Any) -> None:
    def act(group: Any) -> None:
        with refused(ArgumentError, "strategy"):
            trainer_of(group, hooks, **more)

    on_ranks(2, act)
