"""The loss check before the first update: losses and weights that it refuses, those that pass, and no trace of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Loss, MapData, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.precision import Bf16Mixed, Fp16Mixed
from kit import filled
from kit import trainer_of as trainer_of_kit
from refused import refused

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 3)) for n in range(24)]


class Sums(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output, batch[1], reduction="sum")


class Means(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output, batch[1])


class OfMean(Means):
    def loss(self, output: Any, batch: Any) -> Any:
        return Loss.of_mean(super().loss(output, batch), len(batch[1]))


class Penalty(Sums):
    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) + 3.0


class Contrast(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return -(output @ output.T).log_softmax(-1).diagonal().sum()


class OneBatchOneUnit(Sums):
    def weight(self, batch: Any) -> int:
        return 1


class Tokens(Sums):
    """Counts the mean of a loss over fewer units than its weight."""

    def loss(self, output: Any, batch: Any) -> Any:
        return Loss.of_mean(super().loss(output, batch) / len(output), len(output))

    def weight(self, batch: Any) -> int:
        return 2 * len(batch[1])


class Policy(Task):
    """Sum whose terms cancel: the ratio is 1 at first, and advantages add up to nothing."""

    def loss(self, output: Any, batch: Any) -> Any:
        chosen = output.log_softmax(-1)[:, 0]
        advantage = torch.tensor([1.0, -1.0]).repeat(len(chosen))[: len(chosen)]
        return -(advantage * (chosen - chosen.detach()).exp()).sum()


class Silent(Sums):
    """Gives no loss, and a weight of 0, for some samples."""

    def weight(self, batch: Any) -> float:
        return float((batch[1] > 0).sum())

    def loss(self, output: Any, batch: Any) -> Any:
        kept = batch[1] > 0
        return Loss(F.cross_entropy(output[kept], batch[1][kept], reduction="sum") if kept.any() else None)


class Late(Sums):
    late_weight = True

    def loss(self, output: Any, batch: Any) -> Any:
        return Loss(super().loss(output, batch), weight=torch.tensor(float(len(batch[1]))))


class Drops(nn.Sequential):
    """A model that ignores `eval()`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5)


class Small(nn.Linear):
    """A model with memory for four samples."""

    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 4:
            raise torch.OutOfMemoryError("injected")
        return super().forward(input)


def trainer_of(task: Any = None, model: nn.Module | None = None, *hooks: Any, micro: int = 4, **more: Any) -> Trainer:
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    some = MapData(SAMPLES, global_batch_size=8, micro_batch_size=micro)
    return trainer_of_kit(filled(model), *hooks, task=task or Sums(), data=some, updates=2, **more)


@pytest.mark.parametrize("task", [Means, Penalty, Contrast, OneBatchOneUnit, Tokens])
def test_a_loss_that_does_not_add_up_is_refused(task: type[Task]) -> None:
    with refused(TaskError, ""):
        trainer_of(task()).train()
    assert trainer_of(task(), train=Training(check_loss=False)).train().update == 2


@pytest.mark.parametrize("task", [Sums, OfMean, Silent, Late, Policy])
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_sums_pass_in_every_cut(task: type[Task], micro: int) -> None:
    assert trainer_of(task(), micro=micro).train().update == 2


@pytest.mark.parametrize("precision", [Bf16Mixed, Fp16Mixed])
def test_rounding_of_16_bits_is_no_fault_and_hides_none(precision: Any) -> None:
    assert trainer_of(precision=precision()).train().update == 2
    with refused(TaskError, ""):
        trainer_of(Means(), precision=precision()).train()


@pytest.mark.parametrize(
    ("model", "micro"),
    [
        (lambda: Drops(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), 4),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)), 4),
        (lambda: Small(6, 3), 8),
    ],
    ids=["random losses", "statistics of batches", "no memory for the whole"],
)
def test_losses_that_can_not_be_compared_pass(model: Any, micro: int) -> None:
    assert trainer_of(model=model(), micro=micro).train().update == 2
