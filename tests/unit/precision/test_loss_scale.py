"""The loss scale of every mode that has one; its arithmetic in detail is in `test_fp16_mixed`."""

from typing import Any

import pytest

from evenstep.errors import NonFiniteError
from evenstep.precision import PRECISIONS, Fp16True, LossScaled

SCALED: list[Any] = [kind for kind in PRECISIONS.values() if issubclass(kind, LossScaled)]


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("initial", [1.0, 128.0, 2.0**16])
def test_the_growth_window_is_what_was_asked_for_whatever_the_first_scale_is(kind: Any, initial: float) -> None:
    precision = kind(initial=initial, growth_updates=5)
    scales: list[float] = []
    for _ in range(10):
        precision.committed()
        scales.append(precision.scale / initial)
    assert scales == [1.0] * 4 + [2.0] * 5 + [4.0]


@pytest.mark.parametrize("kind", SCALED)
def test_a_state_holds_all_that_the_next_scales_depend_on(kind: Any) -> None:
    events = [True, True, False, True, False, False, True, True, True, True, True, False, True] * 3
    for at in range(len(events)):
        one, other = (kind(initial=2.0**20, growth_updates=3, tolerance=0.3, floor=2.0**-20) for _ in range(2))
        for number, committed in enumerate(events):
            if number == at:
                other.state = one.state
            for precision in (one, other) if number >= at else (one,):
                precision.committed() if committed else precision.overflowed()
        assert one.state == other.state and one.scale == other.scale


@pytest.mark.parametrize("kind", SCALED)
def test_the_floor_stops_and_names_a_format_without_a_scale(kind: Any) -> None:
    precision = kind(initial=2.0, floor=1.0)
    precision.overflowed()
    with pytest.raises(NonFiniteError):
        precision.overflowed()
    assert kind.instead in PRECISIONS and not issubclass(PRECISIONS[kind.instead], LossScaled)
    assert ("no-master" in kind.instead) == ("no-master" in kind.name)


def test_settings_are_what_a_mode_was_built_with() -> None:
    assert Fp16True(initial=8.0, cast_inputs="before-transfer").settings == {
        "initial": 8.0,
        "growth_updates": 2000,
        "tolerance": 0.0,
        "floor": 1e-4,
        "cast_inputs": "before-transfer",
        "float32_outputs": True,
    }
    assert PRECISIONS["bf16-true"]().settings == {"cast_inputs": "after-transfer", "float32_outputs": True}


@pytest.mark.parametrize("name", sorted(PRECISIONS.keys() - {kind.name for kind in SCALED}))
def test_a_format_with_the_range_of_float32_has_no_loss_scale_and_takes_none(name: str) -> None:
    kind: Any = PRECISIONS[name]
    one = kind()
    one.committed()
    assert (one.scale, one.lowest_scale, one.retries_overflow, one.state) == (1.0, 1.0, False, {})
