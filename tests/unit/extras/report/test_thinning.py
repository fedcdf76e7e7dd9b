"""A thinned curve has the same extremes everywhere; a mean is a mean."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.extras.report.thinning import Point, means, thin

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


@settings(max_examples=60, deadline=None)
@given(series(), st.integers(1, 40))
def test_the_means_of_stretches_are_those_of_all_their_values(points: list[Point], stretches: int):
    found = means(points, stretches)
    finite = [value for _, value in points if math.isfinite(value)]
    assert sum(count for _, _, count in found) == len(finite)
    assert math.fsum(mean * count for _, mean, count in found) == pytest.approx(math.fsum(finite), rel=1e-9, abs=1e-6)
    assert [update for update, _, _ in found] == sorted(update for update, _, _ in found)


def test_stretches_without_a_finite_value_have_no_mean():
    assert means([(1, math.nan), (2, 3.0), (3, math.inf)], 3) == [(2.0, 3.0, 1)]
    assert means([(1, math.nan)], 1) == []


def test_a_mean_of_values_whose_sum_would_overflow_is_finite():
    assert means([(1, 1.5e308), (2, 1.5e308)], 1) == [(1.5, 1.5e308, 2)]
