"""Wsd against tables made by numpy."""

import numpy as np
import pytest

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import Constant, Wsd

UPDATES = np.arange(1, 31)


def factors(schedule: Wsd) -> list[float]:
    return [schedule(int(update), 30) for update in UPDATES]


def test_linear_is_a_trapezium():
    expected = np.interp(UPDATES, [0, 5, 20, 30], [0, 1, 1, 0.1])
    assert factors(Wsd(warmup_updates=5, decay_updates=10, shape="linear", end_factor=0.1)) == pytest.approx(
        expected.tolist(), rel=1e-12
    )


@pytest.mark.parametrize(
    ("shape", "remaining"),
    [("sqrt", lambda done: 1 - np.sqrt(done)), ("cosine", lambda done: np.cos(done * np.pi / 2) ** 2)],
)
def test_the_other_shapes_fall_from_one_to_the_end(shape: str, remaining):
    done = np.arange(1, 11) / 10
    expected = np.concatenate([np.arange(1, 6) / 5, np.ones(15), 0.1 + 0.9 * remaining(done)])
    schedule = Wsd(warmup_updates=5, decay_updates=10, shape=shape, end_factor=0.1)
    assert factors(schedule) == pytest.approx(expected.tolist(), rel=1e-12)
    assert factors(schedule)[-1] == 0.1


def test_the_stable_part_may_be_empty():
    schedule = Wsd(warmup_updates=20, decay_updates=10, shape="linear", end_factor=0.0)
    schedule.check(30)
    assert factors(schedule)[18:22] == pytest.approx([0.95, 1.0, 0.9, 0.8])


def test_without_decay_it_is_constant():
    constant = Constant(warmup_updates=4)
    assert factors(Wsd(warmup_updates=4, decay_updates=0)) == [constant(int(update), 30) for update in UPDATES]


@pytest.mark.parametrize(("warmup", "decay"), [(21, 10), (0, 30), (1, 30), (15, 16)])
def test_a_warm_up_and_decay_longer_than_the_run_are_refused(warmup: int, decay: int):
    with pytest.raises(
        ArgumentError, match=rf"`decay_updates` must be at most the 30 updates.*but are {warmup} and {decay}"
    ):
        Wsd(warmup_updates=warmup, decay_updates=decay).check(30)


def test_a_shape_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ArgumentError, match="one of linear, cosine, sqrt, but is '1-sqrt'"):
        Wsd(decay_updates=5, shape="1-sqrt")


def test_a_negative_decay_is_refused():
    with pytest.raises(ArgumentError, match="`decay_updates` must be a whole number"):
        Wsd(decay_updates=-5)
