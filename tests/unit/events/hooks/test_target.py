import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ArgumentError, HookError
from evenstep.events import Bus, EvaluateEnd, Hook
from evenstep.events.hooks.target import MetricTarget

FINITE = st.floats(-1e6, 1e6)


def target(metric: str = "valid/loss", mode: Any = "min", min_delta: float = 0.0) -> MetricTarget:
    return MetricTarget(metric=metric, mode=mode, min_delta=min_delta)


@given(value=FINITE, than=FINITE, min_delta=st.floats(0, 10))
def test_better_is_strict_in_both_directions(value: float, than: float, min_delta: float) -> None:
    assert target(min_delta=min_delta).better(value, than=than) == (than - value > min_delta)
    assert target(mode="max", min_delta=min_delta).better(value, than=than) == (value - than > min_delta)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("than", [None, 0.0])
def test_what_is_not_finite_is_never_better(mode: str, value: float, than: float | None) -> None:
    assert not target(mode=mode).better(value, than=than)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_any_finite_value_is_better_than_none(mode: str) -> None:
    assert target(mode=mode).better(3.0, than=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "loss"}, "`metric` must be an evaluation and its metric"),
        ({"mode": "minimum"}, "`mode` must be one of min, max, but is 'minimum'; is it 'min'?"),
        ({"min_delta": -0.1}, "`min_delta` must be a number of at least 0"),
        ({"min_delta": math.nan}, "`min_delta` must be a number of at least 0"),
    ],
)
def test_an_argument_that_cannot_be_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        target(**arguments)


def test_an_evaluation_that_is_not_there_is_an_error_with_advice(trainer: Any) -> None:
    hook = Hook()
    Bus([hook], trainer)
    target().check(hook)
    with pytest.raises(HookError, match=r"there is no evaluation `vaild`; did you mean `valid/loss`\?"):
        target("vaild/loss").check(hook)


def test_a_metric_that_is_not_there_is_an_error_with_advice() -> None:
    event = EvaluateEnd(update=1, name="valid", metrics={"valid/accuracy": 0.5})
    with pytest.raises(HookError, match=r"`valid` has no such metric; did you mean `valid/accuracy`\?"):
        target("valid/acuracy").value(Hook(), event)


def test_other_evaluations_and_failed_ones_have_no_value() -> None:
    assert target().value(Hook(), EvaluateEnd(update=1, name="test", metrics={"test/loss": 1.0})) is None
    assert target().value(Hook(), EvaluateEnd(update=1, name="valid", metrics={})) is None
    assert target().value(Hook(), EvaluateEnd(update=1, name="valid", metrics={"valid/loss": 1.0})) == 1.0
