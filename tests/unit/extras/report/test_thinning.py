"""A thinned curve has the same extremes everywhere; a mean is a mean."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.extras.report.thinning import Point, smooth, thin

values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


@st.composite
def series(draw: st.DrawFn) -> list[Point]:
    updates = sorted(draw(st.sets(st.integers(0, 5000), min_size=1, max_size=200)))
    return [(update, draw(values)) for update in updates]


@settings(deadline=None)
@given(series(), st.integers(1, 20))
def test_thinning_keeps_points_of_the_curve_in_order(points: list[Point], stretches: int):
    thinned = thin(points, stretches)
    kept = {update for update, _ in thinned}
    assert [repr(point) for point in thinned] == [repr(point) for point in points if point[0] in kept]


@settings(deadline=None)
@given(series(), st.integers(1, 20))
def test_thinning_leaves_at_most_five_points_a_stretch(points: list[Point], stretches: int):
    assert len(thin(points, stretches)) <= 5 * stretches


@settings(deadline=None)
@given(series(), st.integers(1, 20))
def test_every_stretch_keeps_its_lowest_and_highest_value_and_its_gap(points: list[Point], stretches: int):
    thinned = thin(points, stretches)
    first, last = points[0][0], points[-1][0]

    def by_stretch(chosen: list[Point]) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for update, value in chosen:
            found.setdefault(int((update - first) / ((last - first + 1) / stretches)), []).append(value)
        return found

    whole, kept = by_stretch(points), by_stretch(thinned)
    assert whole.keys() == kept.keys()
    for stretch, all_values in whole.items():
        finite = [value for value in all_values if math.isfinite(value)]
        finite_kept = [value for value in kept[stretch] if math.isfinite(value)]
        assert bool(finite) == bool(finite_kept)
        if finite:
            assert (min(finite), max(finite)) == (min(finite_kept), max(finite_kept))
        assert (len(finite) < len(all_values)) == (len(finite_kept) < len(kept[stretch]))


def test_few_points_stay_as_they_are():
    points = [(update, float(update)) for update in range(100)]
    assert thin(points) == points


def test_the_ends_of_a_long_curve_stay():
    points = [(update, math.sin(update)) for update in range(10, 9000)]
    thinned = thin(points, 50)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])


@pytest.mark.parametrize("half_width", [0, 1, 7, 1000])
def test_a_mean_is_of_the_neighbours_that_there_are(half_width: int):
    numbers = [float((7 * index) % 11) for index in range(30)]
    smoothed = smooth(list(enumerate(numbers)), half_width)
    for index, mean in smoothed:
        reach = min(half_width, index)
        assert mean == pytest.approx(statistics.fmean(numbers[index - reach : index + reach + 1]))
    assert [index for index, _ in smoothed] == list(range(30))


def test_one_huge_value_does_not_drown_the_means_after_it():
    points = [(update, 1e30 if update == 5 else 1.0) for update in range(100)]
    assert dict(smooth(points, 3))[50] == 1.0


def test_values_that_are_not_finite_are_in_no_mean():
    assert smooth([(1, 1.0), (2, math.nan), (3, 3.0), (4, math.inf)], 1) == [(1, 1.0), (3, 2.0)]
    assert smooth([(1, math.nan)], 1) == []


def test_a_long_curve_gets_about_as_many_means_as_asked_for_and_the_last():
    smoothed = smooth([(update, 1.0) for update in range(10_001)], 10, num_points=100)
    assert 100 <= len(smoothed) <= 101
    assert smoothed[-1] == (10_000, 1.0)
