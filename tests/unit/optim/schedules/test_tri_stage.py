"""TriStage against its formula in NumPy."""

import numpy as np
import pytest

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import TriStage
from refused import refused

UPDATES = np.arange(1, 31)


def test_it_rises_holds_and_falls_exponentially() -> None:
    u = UPDATES.astype(float)
    fall = np.exp(np.log(0.05) * np.clip((u - 12) / 10, 0, 1))
    expected = np.where(u < 5, 0.2 + 0.8 * u / 5, np.where(u <= 12, 1.0, fall))
    schedule = TriStage(warmup_updates=5, hold_updates=7, decay_updates=10, start_factor=0.2, end_factor=0.05)
    assert [schedule(int(update), 30) for update in UPDATES] == pytest.approx(expected.tolist(), rel=1e-12)
    assert schedule(22, 30) == schedule(30, 30) == 0.05


def test_without_a_length_its_decay_ends_with_the_run() -> None:
    schedule = TriStage(warmup_updates=5, hold_updates=7)
    assert schedule(30, 30) == 0.01
    assert schedule(21, 30) == pytest.approx(0.1, rel=1e-12)
    with refused(ArgumentError, "updates"):
        schedule.check(None)
    TriStage(decay_updates=10).check(None)


def test_its_first_update_has_a_learning_rate() -> None:
    assert TriStage(warmup_updates=4, decay_updates=4)(1, 8) == 0.25
