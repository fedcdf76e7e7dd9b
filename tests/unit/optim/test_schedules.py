"""LR schedules against PyTorch's schedulers or their formula in NumPy, and who sets learning rates."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from evenstep.errors import ArgumentError
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    InverseSqrt,
    Linear,
    Listed,
    LrSchedule,
    Multiplicative,
    PerGroup,
    Plateau,
    Polynomial,
    Step,
    Triangular,
    TriStage,
    Wsd,
)
from refused import refused

GIVEN = (0.5, 1.5, 0.9)


def torch_factors(make: Callable[[torch.optim.Optimizer], LRScheduler], updates: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    factors: list[float] = []
    for _ in range(updates):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def factors(schedule: LrSchedule, updates: int, end: int | None = None) -> list[float]:
    return [schedule(update, end) for update in range(1, updates + 1)]


def after_warmup(make: Callable[[Any], LRScheduler]) -> Callable[[Any], LRScheduler]:
    return lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 1 / 6, 1.0, total_iters=5), make(optimizer)], milestones=[5]
    )


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda optimizer: LinearLR(optimizer, 1 / 5, 1.0, total_iters=4), Constant(warmup_updates=5)),
        (
            after_warmup(lambda optimizer: LinearLR(optimizer, 1.0, 0.1, total_iters=14)),
            Linear(warmup_updates=6, end_factor=0.1),
        ),
        (
            after_warmup(lambda optimizer: CosineAnnealingLR(optimizer, T_max=14, eta_min=0.1)),
            Cosine(warmup_updates=6, end_factor=0.1),
        ),
        (lambda optimizer: PolynomialLR(optimizer, 19, power=3.5), Polynomial(power=3.5, end_factor=0.0)),
    ],
)
def test_it_is_that_of_pytorch(make: Any, schedule: LrSchedule) -> None:
    assert factors(schedule, 20, 20) == pytest.approx(torch_factors(make, 20), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("unit", ["updates", "epochs"])
@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.3), Step, {"every": 4, "factor": 0.3}),
        (lambda optimizer: ExponentialLR(optimizer, gamma=0.8), Multiplicative, {"factors": [0.8]}),
        (
            lambda optimizer: MultiplicativeLR(optimizer, lambda step: GIVEN[min(step - 1, 2)]),
            Multiplicative,
            {"factors": GIVEN},
        ),
        (
            lambda optimizer: MultiStepLR(optimizer, milestones=[3, 7], gamma=0.5),
            Listed,
            {"factors": ((1, 1.0), (4, 0.5), (8, 0.25))},
        ),
    ],
    ids=["step", "exponential", "multiplicative", "multi step"],
)
def test_it_is_that_of_pytorch_by_update_and_by_epoch(make: Any, kind: Any, options: Any, unit: str) -> None:
    schedule = kind(**options, unit=unit)
    if unit == "updates":
        found = factors(schedule, 20, 20)
        assert not schedule.needs
    else:
        found = [schedule.in_epoch(1000 - 3 * epoch, epoch, None) for epoch in range(20)]
        assert [*schedule.needs] == ["epochs"]
    assert found == pytest.approx(torch_factors(make, 20), rel=1e-12)


@pytest.mark.parametrize(("period", "longer"), [(4, 1), (3, 2)])
def test_restarts_are_those_of_pytorch(period: int, longer: int) -> None:
    expected = torch_factors(
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=period, T_mult=longer, eta_min=0.1), 60
    )
    schedule = CosineRestarts(period_updates=period, period_factor=longer, end_factor=0.1)
    assert factors(schedule, 60) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("longer", [1.0, 1.5, 2.0])
def test_periods_shrink_and_follow_a_warm_up(longer: float) -> None:
    expected = [0.25, 0.5, 0.75]
    length, height, left = 6.0, 1.0, 0.0
    while len(expected) < 100:
        inside = np.arange(np.ceil(left), np.ceil(left + length)) - left
        expected += (height * (0.05 + 0.95 * (1 + np.cos(np.pi * inside / length)) / 2)).tolist()
        left, length, height = left + length, length * longer, height * 0.5
    schedule = CosineRestarts(period_updates=6, period_factor=longer, shrink=0.5, warmup_updates=4, end_factor=0.05)
    assert factors(schedule, 100) == pytest.approx(expected[:100], rel=1e-9)


@pytest.mark.parametrize(("mode", "shrink"), [("triangular", 1.0), ("triangular2", 0.5)])
def test_cycles_are_those_of_pytorch_whose_count_begins_at_0(mode: Any, shrink: float) -> None:
    expected = torch_factors(
        lambda one: CyclicLR(one, base_lr=0.2, max_lr=1.0, step_size_up=5, mode=mode, cycle_momentum=False), 41
    )
    schedule = Triangular(period_updates=10, low_factor=0.2, shrink=shrink)
    assert factors(schedule, 40) == pytest.approx(expected[1:], rel=1e-12)
    assert Triangular(period_updates=10)(5 + 10**10, None) == 1


@pytest.mark.parametrize("warmup", [1, 2, 40])
def test_inverse_sqrt_is_the_formula_of_the_paper_with_a_peak_of_one(warmup: int) -> None:
    update = np.arange(1.0, 201.0)
    expected = np.minimum(update**-0.5, update * warmup**-1.5) * warmup**0.5
    assert factors(InverseSqrt(warmup_updates=warmup), 200) == pytest.approx(expected.tolist(), rel=1e-12)
    assert InverseSqrt()(4, None) == 0.5


@pytest.mark.parametrize(
    ("shape", "remaining"),
    [
        ("linear", lambda done: 1 - done),
        ("sqrt", lambda done: 1 - np.sqrt(done)),
        ("cosine", lambda done: np.cos(done * np.pi / 2) ** 2),
    ],
)
def test_wsd_rises_is_stable_and_falls_to_the_end(shape: Any, remaining: Any) -> None:
    done = np.arange(1, 11) / 10
    expected = np.concatenate([np.arange(1, 6) / 5, np.ones(15), 0.1 + 0.9 * remaining(done)])
    found = factors(Wsd(warmup_updates=5, decay_updates=10, shape=shape, end_factor=0.1), 30, 30)
    assert found == pytest.approx(expected.tolist(), rel=1e-12)
    assert found[-1] == 0.1


def test_tri_stage_rises_holds_and_falls_exponentially() -> None:
    u = np.arange(1.0, 31.0)
    fall = np.exp(np.log(0.05) * np.clip((u - 12) / 10, 0, 1))
    expected = np.where(u < 5, 0.2 + 0.8 * u / 5, np.where(u <= 12, 1.0, fall))
    schedule = TriStage(warmup_updates=5, hold_updates=7, decay_updates=10, start_factor=0.2, end_factor=0.05)
    assert factors(schedule, 30, 30) == pytest.approx(expected.tolist(), rel=1e-12)
    assert schedule(22, 30) == schedule(30, 30) == 0.05
    whole = TriStage(warmup_updates=5, hold_updates=7)
    assert (whole(30, 30), whole(21, 30)) == (0.01, pytest.approx(0.1, rel=1e-12))


def test_a_schedule_of_a_group_is_found_by_the_groups_number() -> None:
    schedule = PerGroup({1: Linear(), "head": Cosine()})
    assert (schedule.of_group("1"), schedule.of_group("head/no_decay")) == (Linear(), Cosine())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TriStage(warmup_updates=2, hold_updates=4, decay_updates=5).check(10), "decay_updates"),
        (lambda: TriStage().check(None), "updates"),
        (lambda: Wsd(warmup_updates=15, decay_updates=16).check(30), "decay_updates"),
        (lambda: Listed(factors=((1, 1.0), (5, 0.5), (5, 0.1))), "factors"),
        (lambda: PerGroup(groups={"head": "cosine"}), "groups.head"),  # pyright: ignore
    ],
)
def test_an_impossible_schedule_is_refused(make: Any, field: str) -> None:
    with refused(ArgumentError, field):
        make()


@pytest.mark.parametrize("seed", range(6))
def test_it_is_that_of_pytorch_whose_patience_is_one_less(seed: int) -> None:
    draw = random.Random(seed)
    mode = draw.choice(["min", "max"])
    patience, delta = draw.randint(1, 4), draw.choice([0.0, 0.05])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = ReduceLROnPlateau(
        optimizer,
        mode=mode,
        factor=0.5,
        patience=patience - 1,
        threshold=delta,
        threshold_mode="abs",
        min_lr=0.01,
        eps=0.0,
    )
    ours = Plateau(mode=mode, factor=0.5, patience_evaluations=patience, min_delta=delta, min_factor=0.01)
    for update in range(1, 80):
        value = 1 + draw.random()
        theirs.step(value)
        ours.evaluated(value, update=update)
        assert ours(update, None) == optimizer.param_groups[0]["lr"]
    assert ours.state["multiplier"] < 1


def sgd(*rates: float, **more: object) -> SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate, **more} for rate in rates]
    return SGD(groups)


def test_a_rate_set_elsewhere_is_refused_where_a_schedule_would_undo_it() -> None:
    optimizer = sgd(0.5, 0.1)
    rates = LearningRates(optimizer, Constant(), 10)
    assert rates(1) == [0.5, 0.1]
    optimizer.param_groups[1]["lr"] = 0.01
    with refused(ArgumentError, "lr_schedule"):
        rates(2)
    fresh = LearningRates(optimizer := sgd(0.5), Constant(), 10)
    optimizer.param_groups[0]["lr"] = 0.4  # also before the first update
    with refused(ArgumentError, "lr_schedule"):
        fresh(1)


@pytest.mark.parametrize("given", [math.nan, -0.5])
@pytest.mark.parametrize("per_group", [False, True])
def test_what_is_no_multiplier_is_refused_before_a_rate_is_set(given: Any, per_group: bool) -> None:
    class Own(LrSchedule):
        def __call__(self, update: int, updates: int | None) -> float:
            return given if update == 2 else 1  # a whole number is one, too

        def check(self, updates: int | None) -> None: ...

    optimizer = sgd(0.5)
    rates = LearningRates(optimizer, PerGroup({"0": Own()}, Constant()) if per_group else Own(), 4)
    assert rates(1) == [0.5]
    with refused(ArgumentError, "lr_schedule"):
        rates(2)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rate_that_comes_from_a_checkpoint_is_nobodys_change() -> None:
    optimizer = sgd(0.5)
    rates = LearningRates(optimizer, Linear(warmup_updates=4), 8)
    rates(4)
    optimizer.param_groups[0]["lr"] = 0.125  # as of update 1
    rates.load_state_dict({}, 0)
    assert rates(2) == [0.25]
