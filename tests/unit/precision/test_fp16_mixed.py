import pytest

from evenstep.errors import NonFiniteError
from evenstep.precision import Fp16Mixed


def commits(precision: Fp16Mixed, count: int) -> None:
    for _ in range(count):
        precision.committed()


def test_the_scale_doubles_after_the_growth_window_only() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=3)
    commits(precision, 2)
    assert precision.scale == 8.0
    commits(precision, 1)
    assert precision.scale == 16.0
    commits(precision, 3)
    assert precision.scale == 32.0


def test_an_overflow_halves_the_scale_and_restarts_the_window() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=3)
    commits(precision, 2)
    precision.overflowed()
    assert precision.scale == 4.0
    commits(precision, 2)
    assert precision.scale == 4.0
    commits(precision, 1)
    assert precision.scale == 8.0


def test_a_tolerated_overflow_lowers_the_scale_for_one_update() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=1000, tolerance=0.2)
    commits(precision, 9)
    precision.overflowed()  # 1 of 10 tries: tolerated
    assert precision.scale == 4.0
    commits(precision, 1)
    assert precision.scale == 8.0


def test_two_tolerated_overflows_of_one_update_give_the_first_scale_back() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=1000, tolerance=0.5)
    commits(precision, 9)
    precision.overflowed()
    precision.overflowed()
    assert precision.scale == 2.0
    commits(precision, 1)
    assert precision.scale == 8.0


def test_overflows_beyond_the_tolerance_lower_the_scale_for_good() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=1000, tolerance=0.2)
    commits(precision, 3)
    precision.overflowed()  # 1 of 4 tries
    commits(precision, 2)
    assert precision.scale == 4.0


def test_the_floor_stops_with_advice_and_keeps_the_scale() -> None:
    precision = Fp16Mixed(initial=2.0, floor=1.0)
    precision.overflowed()
    with pytest.raises(NonFiniteError):
        precision.overflowed()
    assert precision.scale == 1.0


def test_the_state_carries_window_share_and_borrowed_scale() -> None:
    precision = Fp16Mixed(initial=8.0, growth_updates=5, tolerance=0.5)
    commits(precision, 4)
    precision.overflowed()
    other = Fp16Mixed(initial=1024.0, growth_updates=5, tolerance=0.5)
    other.state = precision.state
    for each in (precision, other):
        commits(each, 5)
    assert other.state == precision.state
    assert other.scale == 16.0
