"""Arguments of schedules that are out of their range, and runs that are too short."""

from typing import Any

import pytest

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import (
    Linear,
    Listed,
    Triangular,
    TriStage,
    Wsd,
)
from refused import refused


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Triangular(period_updates=21).check(10), "period_updates"),
        (lambda: TriStage(warmup_updates=2, hold_updates=4, decay_updates=5).check(10), "hold_updates"),
        (lambda: Linear().check(None), "updates"),
        (lambda: Listed(factors=((2, 1.0),)), "factors"),
        (lambda: Listed(factors=((1, 1.0), (5, 0.5), (5, 0.1))), "factors"),
        (lambda: Listed.of_rates(((1, 0.0),), lr=0.1), "rates"),
        (lambda: Listed(factors=((1, 1.0), (50, 0.5))).check(20), "factors"),
        (lambda: Wsd(warmup_updates=15, decay_updates=16).check(30), "decay_updates"),
    ],
)
def test_what_can_not_be_is_refused(make: Any, field: str) -> None:
    with refused(ArgumentError, field):
        make()
