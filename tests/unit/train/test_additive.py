"""Losses told apart by numbers alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.train.checks.additive import (
    NARROW,
    WIDE,
    LossValue,
    SecondLook,
    adds_up,
    kind_of,
    means_among,
    sums_among,
)

LOSS = st.floats(0.05, 10)


def of(losses: list[float], weights: list[float] | None = None) -> list[LossValue]:
    return [LossValue(loss=loss, weight=w) for loss, w in zip(losses, weights or [1.0] * len(losses), strict=True)]


@given(units=st.lists(LOSS, min_size=4, max_size=16), wide=st.booleans())
def test_a_sum_adds_up_and_its_mean_is_told_as_a_mean(units: list[float], wide: bool) -> None:
    tolerance, middle = WIDE if wide else NARROW, len(units) // 2
    parts = [units[:middle], units[middle:]]
    count = [float(len(part)) for part in parts]
    whole = LossValue(loss=math.fsum(units), weight=len(units))
    assert adds_up(whole, of([math.fsum(part) for part in parts], count), tolerance)
    means = [math.fsum(part) / len(part) for part in parts]
    mean = LossValue(loss=math.fsum(units) / len(units), weight=len(units))
    deeper = [[math.fsum(half) / len(half) for half in (part[:1], part[1:])] for part in parts]
    assert not adds_up(mean, of(means, count), tolerance)
    assert kind_of(mean, of(means, count), SecondLook(whole=[mean.loss], parts=deeper), tolerance) == ("mean", 0.0)


@given(units=st.lists(LOSS, min_size=4, max_size=8), term=st.floats(1, 5))
def test_a_term_per_batch_is_told_with_its_size(units: list[float], term: float) -> None:
    quarters = [[one + term for one in half] for half in (units[:2], units[2:4])]
    halves = [math.fsum(half) - term for half in quarters]
    whole = LossValue(loss=math.fsum(halves) - term, weight=4)
    kind, size = kind_of(whole, of(halves), SecondLook(whole=[whole.loss], parts=quarters), WIDE)
    assert kind == "mean" or (kind == "term" and size == pytest.approx(term, rel=1e-2))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_in_batch_negatives_depend_on_the_whole(reduction: str) -> None:
    def loss(count: int) -> float:
        return math.log(count) * (count if reduction == "sum" else 1)

    again = SecondLook(whole=[loss(16)], parts=[[loss(4)] * 2] * 2)
    assert kind_of(LossValue(loss=loss(16), weight=16), of([loss(8)] * 2), again, WIDE)[0] == "whole"


def test_in_batch_negatives_of_which_the_smallest_parts_have_none_depend_on_the_whole() -> None:
    again = SecondLook(whole=[5.4] * 6, parts=[[0.0, 0.0]] * 2)
    assert kind_of(LossValue(loss=5.4, weight=4), of([0.0, 0.0]), again, WIDE)[0] == "whole"


@given(noise=st.lists(st.floats(-1e-6, 1e-6), min_size=7, max_size=7))
def test_what_rounding_leaves_of_terms_that_cancel_is_no_fault(noise: list[float]) -> None:
    whole, first, second, *quarters = noise
    again = SecondLook(whole=[whole], parts=[quarters[:2], quarters[2:]])
    assert kind_of(LossValue(loss=whole, weight=64), of([first, second], [32, 32]), again, WIDE)[0] in (
        None,
        "mean",
        "term",
    )
    assert kind_of(LossValue(loss=whole, weight=64), of([first, second], [32, 32]), again, WIDE)[0] != "whole"


def test_a_loss_that_is_another_each_time_is_only_told_from_a_mean() -> None:
    parts, deeper = of([5.0, 6.5], [8, 8]), [[2.0, 2.5], [3.0, 3.1]]
    assert kind_of(LossValue(loss=9.0, weight=16), parts, SecondLook(whole=[11.5], parts=deeper), WIDE)[0] is None
    means = of([2.0, 2.2], [8, 8])
    assert kind_of(LossValue(loss=2.15, weight=16), means, SecondLook(whole=[2.05], parts=deeper), WIDE)[0] == "mean"


def test_metrics_with_weights_that_add_up_are_no_means() -> None:
    def of_metric(total: float, weight: float) -> LossValue:
        return LossValue(loss=0.0, weight=1.0, metrics={"right": (total, weight)})

    assert means_among(of_metric(3, 8), [of_metric(1, 4), of_metric(2, 4)]) == {}
    assert means_among(of_metric(2.0, 1), [of_metric(2.0, 1), of_metric(2.0, 1)]) == {}  # a temperature, say
    assert means_among(of_metric(0.4, 1), [of_metric(0.3, 1), of_metric(0.5, 1)]) == {"right": 1}
    assert sums_among(of_metric(3, 8), [of_metric(1, 4), of_metric(2, 4)]) == {}
    assert sums_among(of_metric(0, 8), [of_metric(0, 4), of_metric(0, 4)]) == {}
    assert sums_among(of_metric(8 * 3, 8), [of_metric(4 * 1, 4), of_metric(4 * 2, 4)]) == {"right": 3}


@given(units=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), factor=st.floats(1.05, 3))
def test_of_two_units_a_factor_of_the_second_place_is_told_though_single_ones_can_not_be_cut(
    units: tuple[float, float], factor: float
) -> None:
    first, second = units
    whole = LossValue(loss=first + factor * second, weight=2)
    parts = [LossValue(loss=one, weight=1) for one in units]
    kind, _ = kind_of(whole, parts, SecondLook(whole=[whole.loss] * 6, parts=[[], []]), WIDE)
    assert kind == "whole" or adds_up(whole, parts, WIDE)
