"""The loss check before the first update: losses and weights that it refuses, those that pass, and that it leaves no
trace."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Hook, Loss, MapData, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.precision import Bf16Mixed, Fp16Mixed
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


class LateOnce(Late):
    def loss(self, output: Any, batch: Any) -> Any:
        return Loss(Sums.loss(self, output, batch), weight=torch.tensor(1.0))


class Drops(nn.Sequential):
    """A model that ignores `eval()`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5)


class Small(nn.Module):
    """A model with memory for so many samples."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.linear = room, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError("injected")
        return self.linear(x)


def trainer_of(task: Any = None, model: nn.Module | None = None, *, micro: int | None = 4, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    more.setdefault("data", MapData(SAMPLES, global_batch_size=8, micro_batch_size=micro))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model=model, task=task or Sums(), optimizer=optimizer, device="cpu", updates=2, **more)


@pytest.mark.parametrize("task", [Means, Penalty, Contrast, OneBatchOneUnit, Tokens, LateOnce])
def test_what_does_not_add_up_is_refused(task: type[Task]) -> None:
    with refused(TaskError, ""):
        trainer_of(task()).train()
    assert trainer_of(task(), train=Training(check_loss=False)).train().update == 2


@pytest.mark.parametrize("task", [Sums, OfMean, Silent, Late])
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_sums_pass_in_every_cut(task: type[Task], micro: int) -> None:
    assert trainer_of(task(), micro=micro).train().update == 2


def test_a_sum_whose_terms_cancel_passes() -> None:
    assert trainer_of(Policy()).train().update == 2


@pytest.mark.parametrize("precision", [Bf16Mixed, Fp16Mixed])
def test_rounding_of_16_bits_is_no_fault_and_hides_none(precision: Any) -> None:
    assert trainer_of(precision=precision()).train().update == 2
    with refused(TaskError, ""):
        trainer_of(Means(), precision=precision()).train()


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_random_losses_and_statistics_of_batches_are_not_compared(micro: int) -> None:
    assert trainer_of(model=Drops(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), micro=micro).train().update == 2
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    assert trainer_of(model=nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)), micro=micro).train().update == 2


def test_the_check_ends_no_run_for_lack_of_memory() -> None:
    assert trainer_of(model=Small(4), micro=8).train().update == 2


def test_the_check_leaves_no_trace() -> None:
    class Remembers(Sums):
        def __init__(self) -> None:
            self.centre = torch.zeros(3)

        def loss(self, output: Any, batch: Any) -> Any:
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
            return super().loss(output, batch) + ((output - self.centre) ** 2).sum()

        def state_dict(self) -> dict[str, Any]:
            return {"centre": self.centre}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.centre = state["centre"]

    def run(*, check_loss: bool) -> Any:
        heard: list[str] = []

        class Hears(Hook):
            def before_microbatch(self, event: Any) -> None:
                heard.append(f"{event.update} {event.microbatch}")

            def on_incident(self, event: Any) -> None:
                heard.append(event.kind)

        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 3))
        task = Remembers()
        trainer = trainer_of(task, model, hooks=[Hears()], train=Training(check_loss=check_loss))
        trainer.train()
        records = [record[:3] for name in trainer.storage.names() for record in trainer.storage.history(name)]
        values = [value.tolist() for value in (*model.state_dict().values(), task.centre)]
        return values, heard, [record for record in records if "perf" not in record[1]]

    assert run(check_loss=True) == run(check_loss=False)
