from typing import Any

import pytest
import torch

from evenstep.errors import ArgumentError, TaskError
from evenstep.train import Collected, Trained
from evenstep.train.tasks.metrics import check_names

BATCH = [torch.zeros(4)]


def test_the_only_loss_may_be_called_loss_and_a_metric_may_not() -> None:
    output = {"loss": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}
    assert set(Collected(keys=("loss",)).loss(output, [torch.zeros(4)]).metrics) == {"accuracy"}
    task = Collected(keys=("acc*",))
    with pytest.raises(TaskError, match="gives a metric called `loss`"):
        check_names(task, task.loss(output, [torch.zeros(4)]))


def test_only_whole_names_that_match_are_trained_on() -> None:
    output: dict[str, Any] = {
        "loss_class": torch.tensor(1.0),
        "head": {"loss_box": torch.tensor(2.0)},
        "lossless_ratio": torch.tensor(100.0),
        "my_loss_class": torch.tensor(100.0),
        "scores": torch.ones(4, 2),
    }
    loss = Collected(keys=("loss_*", "head/loss_*")).loss(output, BATCH)
    assert loss.sum == 3
    assert set(loss.metrics) == {"loss_class", "head/loss_box", "lossless_ratio", "my_loss_class"}


def test_losses_are_told_by_their_type_where_there_are_no_patterns() -> None:
    output = {"a": Trained(torch.tensor(1.0)), "b": Trained(None), "total_loss": torch.tensor(100.0)}
    assert Collected().loss(output, BATCH).sum == 1
    assert Collected().loss({"total_loss": torch.tensor(100.0)}, BATCH).sum is None


def test_means_are_multiplied_by_the_weight_of_the_batch() -> None:
    task = Collected(keys=("loss",), averaged=True)
    loss = task.loss({"loss": torch.tensor(1.5)}, BATCH)
    assert loss.sum == 6
    assert "loss" not in loss.metrics  # the run records it as the loss


def test_empty_losses_are_none_at_all() -> None:
    assert Collected(keys=("loss",)).loss({"loss": torch.zeros(0)}, BATCH).sum is None


@pytest.mark.parametrize("pattern", ["*loss*", "*"])
def test_a_pattern_open_at_both_ends_is_refused(pattern: str) -> None:
    with pytest.raises(ArgumentError, match="takes metrics as well as losses"):
        Collected(keys=(pattern,))


def test_outputs_that_cannot_hold_losses_are_errors() -> None:
    with pytest.raises(TaskError, match="but the model gave a Tensor"):
        Collected().loss(torch.zeros(()), BATCH)
    with pytest.raises(TaskError, match="the output `loss` is a loss by its name, but is a float"):
        Collected(keys=("loss",)).loss({"loss": 1.0}, BATCH)
