"""Wsd against tables made by numpy."""

import numpy as np
import pytest

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
