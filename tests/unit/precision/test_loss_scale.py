"""The dynamic loss scale, and the precisions that have one."""

from typing import Any

import pytest

from evenstep.precision import PRECISIONS, Fp16Mixed, LossScale, LossScaled

SCALED: list[Any] = [kind for kind in PRECISIONS.values() if issubclass(kind, LossScaled)]


def scale_of(**options: Any) -> LossScale:
    return Fp16Mixed(**options).build_loss_scale()


def commit(scale: LossScale, count: int) -> None:
    for _ in range(count):
        scale.committed()


@pytest.mark.parametrize("kind", SCALED)
def test_the_scale_doubles_after_each_growth_window(kind: Any) -> None:
    scale = kind(initial=4.0, growth_updates=5).build_loss_scale()
    values: list[float] = []
    for _ in range(10):
        scale.committed()
        values.append(scale.value)
    assert values == [4.0] * 4 + [8.0] * 5 + [16.0]


def test_an_overflow_halves_the_scale_and_restarts_the_window() -> None:
    scale = scale_of(initial=8.0, growth_updates=3)
    commit(scale, 2)
    scale.halve()
    assert scale.value == 4.0
    commit(scale, 2)
    assert scale.value == 4.0
    commit(scale, 1)
    assert scale.value == 8.0


def test_the_scale_stays_at_its_floor() -> None:
    scale = scale_of(initial=2.0, floor=1.0)
    assert scale.halve()
    assert not scale.halve()
    assert scale.value == 1.0


def test_a_state_holds_all_that_the_next_scales_depend_on() -> None:
    events = [True, True, False, True, False, False, True, True, True, True, True, False, True] * 3
    for at in range(len(events)):
        one, other = (scale_of(initial=2.0**20, growth_updates=3, floor=2.0**-20) for _ in range(2))
        for number, committed in enumerate(events):
            if number == at:
                other.load_state_dict(one.state_dict())
            for scale in (one, other) if number >= at else (one,):
                scale.committed() if committed else scale.halve()
        assert one.state_dict() == other.state_dict()
