"""What else than updates curves can be drawn over."""

import math
from pathlib import Path

import pytest

from evenstep.extras.report.axes import axes, is_axis, names_of_axes
from evenstep.extras.report.run import ReportedRun, StartLine


def run_of(metrics: dict[str, dict[int, float]], *starts: tuple[int, str]) -> ReportedRun:
    lines = [
        StartLine(update=update, time=time, resumed_from="", command="", layout={}, git={}, environment={})
        for update, time in starts
    ]
    return ReportedRun(folder=Path("a"), metrics=metrics, starts=lines)


def test_what_a_run_counts_is_an_axis_by_its_unit() -> None:
    run = run_of({"progress/samples": {10: 80.0, 20: 160.0}, "progress/words": {10: 5.0}})
    found = axes(run)
    assert found["samples"] == [(0, 0.0), (10, 80.0), (20, 160.0)]
    assert found["words"] == [(0, 0.0), (10, 5.0)]
    assert names_of_axes([run]) == ["updates", "samples", "words", "time"]
    assert names_of_axes([run_of({})]) == ["updates", "samples", "tokens", "time"]


def test_time_is_since_the_first_start_without_the_pauses_between_two() -> None:
    clock = {10: 1_767_225_610.0, 20: 1_767_225_620.0, 30: 1_767_312_005.0}  # a day later
    run = run_of({"perf/time": clock}, (0, "2026-01-01T00:00:00+00:00"), (20, "2026-01-02T00:00:00+00:00"))
    assert axes(run)["time"] == [(0, 0.0), (10, 10.0), (20, 20.0), (30, 25.0)]


def test_time_begins_with_the_first_window_where_no_start_is_known() -> None:
    run = run_of({"perf/time": {10: 1000.0, 20: 1006.0}, "perf/update_s": {10: 0.5, 20: 0.6}})
    assert axes(run)["time"] == [(0, 0.0), (10, 5.0), (20, 11.0)]


@pytest.mark.parametrize("missing", [{}, {"perf/samples_per_s": {10: 2.0}}, {"perf/samples_per_s": {20: math.nan}}])
def test_samples_that_are_not_known_are_no_axis(missing: dict[str, dict[int, float]]) -> None:
    assert "samples" not in axes(run_of({"perf/update_s": {20: 0.5}} | missing))


def test_a_count_that_goes_back_or_is_not_finite_is_left_out_there() -> None:
    found = axes(run_of({"progress/samples": {1: 8.0, 2: math.nan, 3: 4.0, 4: 32.0}}))
    assert found["samples"] == [(0, 0.0), (1, 8.0), (4, 32.0)]


def test_a_long_run_has_few_points_and_keeps_the_last() -> None:
    found = axes(run_of({"progress/samples": {update: 8.0 * update for update in range(1, 5001)}}))["samples"]
    assert len(found) <= 502
    assert found[-1] == (5000, 40_000.0)


def test_what_is_an_axis_is_no_curve() -> None:
    assert is_axis("progress/samples")
    assert is_axis("perf/time")
    assert not is_axis("perf/update_s")
