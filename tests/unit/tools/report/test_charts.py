"""Which curves share a chart, and what is told beside the picture."""

import json
import math
from dataclasses import asdict

from evenstep.tools.report.charts import Chart, Metrics
from evenstep.tools.report.charts import charts as charts_of_runs


def charts(metrics: Metrics) -> list[Chart]:
    return charts_of_runs([("a", metrics)])


def test_training_and_evaluations_of_one_measure_share_axes():
    loss, lr = charts({"valid/loss": {2: 1.0}, "train/loss": {1: 3.0, 2: 2.0}, "train/lr": {1: 0.1}})
    assert (loss.title, [(curve.label, curve.updates, curve.values) for curve in loss.curves]) == (
        "loss",
        [("train", [1, 2], [3.0, 2.0]), ("valid", [2], [1.0])],
    )
    assert lr.title == "lr"


def test_the_loss_comes_first_and_timings_last_each_on_its_own_axes():
    names = ["perf/update_s", "train/lr", "train/grad_norm", "valid/accuracy", "perf/tokens_per_s", "train/loss"]
    assert [chart.title for chart in charts({name: {1: 1.0} for name in names})] == [
        "loss",
        "accuracy",
        "grad_norm",
        "lr",
        "perf/tokens_per_s",
        "perf/update_s",
    ]


def test_a_source_has_one_colour_in_all_charts():
    found = charts({name: {1: 1.0} for name in ("train/loss", "valid/loss", "test/loss", "valid/accuracy", "perf/s")})
    colors = {(chart.title, curve.label): curve.color for chart in found for curve in chart.curves}
    assert colors["loss", "valid"] == colors["accuracy", "valid"]
    assert len({colors["loss", label] for label in ("train", "valid", "test")} | {colors["perf/s", "s"]}) == 4


def test_a_value_that_is_not_finite_is_a_gap_and_is_told():
    (chart,) = charts({"train/loss": {1: 1.0, 2: math.nan, 3: math.inf, 4: 2.0}})
    assert chart.curves[0].values == [1.0, None, None, 2.0]
    assert chart.notes == ["train: 2 not finite, the first at update 2"]
    json.dumps(asdict(chart), allow_nan=False)


def test_runs_share_charts_each_with_its_colour_and_sources_with_patterns():
    runs: list[tuple[str, Metrics]] = [
        ("a", {"train/loss": {1: 3.0}, "valid/loss": {1: 2.0}, "train/lr": {1: 0.1}}),
        ("b", {"train/loss": {1: 4.0}, "valid/loss": {1: 5.0}}),
    ]
    loss, lr = charts_of_runs(runs)
    assert [(curve.label, curve.run, curve.color, curve.dash) for curve in loss.curves] == [
        ("a train", 0, 0, 0),
        ("a valid", 0, 0, 1),
        ("b train", 1, 1, 0),
        ("b valid", 1, 1, 1),
    ]
    assert [curve.label for curve in lr.curves] == ["a"]


def test_metrics_of_layers_and_timings_stand_under_headings_after_the_others():
    names = ["perf/update_s", "train/grad_norm/blocks.0", "train/grad_norm", "train/loss", "mem/peak"]
    assert [(chart.group, chart.title) for chart in charts({name: {1: 1.0} for name in names})] == [
        ("", "loss"),
        ("", "grad_norm"),
        ("grad_norm", "grad_norm/blocks.0"),
        ("mem", "mem/peak"),
        ("perf", "perf/update_s"),
    ]


def test_a_logarithmic_axis_is_offered_where_it_can_be_drawn():
    def can_log(*values: float) -> bool:
        return charts({"x": dict(enumerate(values))})[0].can_log

    assert can_log(0.0, 1.0, 100.0)
    assert not can_log(-1.0, 1.0, 100.0)
    assert not can_log(1.0)
    assert not can_log(math.nan, math.inf)
