"""Arguments of schedules that are out of their range, and runs that are too short."""

import math
from typing import Any

import pytest

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import (
    CosineRestarts,
    Linear,
    Listed,
    Multiplicative,
    Plateau,
    Polynomial,
    Step,
    Triangular,
    TriStage,
    Wsd,
)
from refused import refused


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CosineRestarts(period_updates=0), "period_updates"),
        (lambda: CosineRestarts(period_updates=4, period_factor=0.5), "period_factor"),
        (lambda: CosineRestarts(period_updates=4, shrink=0.0), "shrink"),
        (lambda: Triangular(period_updates=1), "period_updates"),
        (lambda: Triangular(period_updates=4, low_factor=0.0), "low_factor"),
        (lambda: Triangular(period_updates=21).check(10), "period_updates"),
        (lambda: TriStage(end_factor=0.0), "end_factor"),
        (lambda: TriStage(start_factor=1.5), "start_factor"),
        (lambda: TriStage(decay_updates=0), "decay_updates"),
        (lambda: TriStage(warmup_updates=2, hold_updates=4, decay_updates=5).check(10), "hold_updates"),
        (lambda: Plateau(metric="loss"), "metric"),
        (lambda: Plateau(mode="low"), "mode"),  # type: ignore[arg-type]
        (lambda: Plateau(factor=1.0), "factor"),
        (lambda: Plateau(patience_evaluations=0), "patience_evaluations"),
        (lambda: Polynomial(power=math.nan), "power"),
        (lambda: Linear().check(None), "updates"),
        (lambda: Step(every=0), "every"),
        (lambda: Step(every=2, factor=1.5), "factor"),
        (lambda: Step(every=2, unit="steps"), "unit"),  # type: ignore[arg-type]
        (lambda: Multiplicative(factors=()), "factors"),
        (lambda: Multiplicative(factors=(0.0,)), "factors"),
        (lambda: Listed(factors=((2, 1.0),)), "factors"),
        (lambda: Listed(factors=((1, 1.0), (5, 0.5), (5, 0.1))), "factors"),
        (lambda: Listed.of_rates(((1, 0.0),), lr=0.1), "rates"),
        (lambda: Listed(factors=((1, 1.0), (50, 0.5))).check(20), "factors"),
        (lambda: Wsd(warmup_updates=15, decay_updates=16).check(30), "decay_updates"),
        (lambda: Wsd(decay_updates=5, shape="1-sqrt"), "shape"),  # type: ignore[arg-type]
    ],
)
def test_what_can_not_be_is_refused(make: Any, field: str) -> None:
    with refused(ArgumentError, field):
        make()
