import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ArgumentError, HookError
from evenstep.events import EvaluateEvent, Hook
from evenstep.events.hooks.target import MetricTarget
from refused import refused

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


def test_other_evaluations_and_failed_ones_have_no_value() -> None:
    assert target().value(Hook(), EvaluateEvent(update=1, name="test", metrics={"test/loss": 1.0})) is None
    assert target().value(Hook(), EvaluateEvent(update=1, name="valid", metrics={})) is None
    assert target().value(Hook(), EvaluateEvent(update=1, name="valid", metrics={"valid/loss": 1.0})) == 1.0


@pytest.mark.parametrize(("metric", "mode", "field"), [("loss", "min", "metric"), ("valid/loss", "minimum", "mode")])
def test_an_argument_that_cannot_be_is_refused(metric: str, mode: Any, field: str) -> None:
    with refused(ArgumentError, field):
        target(metric, mode)


def test_an_evaluation_or_a_metric_that_is_not_there_is_refused(trainer: Any) -> None:
    hook = Hook()
    hook.attach(trainer)
    for metric, asked in (("other/loss", True), ("valid/loss", False)):
        with refused(HookError, "metric"):
            target(metric).check(hook, asked=asked)
    target().check(hook)
    with refused(HookError, "metric"):
        target("valid/loss").value(Hook(), EvaluateEvent(update=1, name="valid", metrics={"valid/accuracy": 1.0}))
