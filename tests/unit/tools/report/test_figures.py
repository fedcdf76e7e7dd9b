"""Last and best values, and how numbers are spelt."""

import math

import pytest

from evenstep.tools.report.figures import direction, metric_figures


def test_the_best_loss_is_the_lowest_and_the_best_accuracy_the_highest():
    loss, accuracy = metric_figures(
        {"valid/loss": {1: 3.0, 2: 1.0, 3: 2.0}, "valid/accuracy": {1: 0.5, 2: 0.9, 3: 0.7}}
    )
    assert (loss.name, loss.last, loss.last_update, loss.best, loss.best_update) == ("valid/loss", 2.0, 3, 1.0, 2)
    assert (accuracy.last, accuracy.best, accuracy.best_update) == (0.7, 0.9, 2)


def test_nan_is_never_best_but_may_be_last():
    (figures,) = metric_figures({"train/loss": {1: math.nan, 2: 5.0, 3: -math.inf, 4: math.nan}})
    assert (figures.best, figures.best_update) == (5.0, 2)
    assert math.isnan(figures.last)


def test_of_equal_values_the_first_is_best():
    (figures,) = metric_figures({"x/acc": {1: 0.5, 2: 0.9, 3: 0.9}})
    assert figures.best_update == 2


@pytest.mark.parametrize("name", ["train/lr", "train/grad_norm", "perf/loss_s", "train/tokens"])
def test_where_the_name_does_not_tell_no_best_is_claimed(name: str):
    (figures,) = metric_figures({name: {1: 1.0}})
    assert (direction(name), figures.best) == (0, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("valid/bits_per_byte", 1), ("valid/perplexity", 1), ("test/rmse", 1), ("valid/f1", -1), ("valid/acc", -1)],
)
def test_the_direction_is_told_from_the_name(name: str, expected: int):
    assert direction(name) == expected


def test_evaluations_come_before_training_and_both_before_the_rest():
    names = ["perf/update_s", "train/lr", "train/loss", "valid/accuracy", "valid/loss"]
    assert [figures.name for figures in metric_figures({name: {1: 1.0} for name in names})] == [
        "valid/loss",
        "valid/accuracy",
        "train/loss",
        "train/lr",
        "perf/update_s",
    ]
