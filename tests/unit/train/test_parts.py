"""The small parts of an update: weighing, moving, rolling buffers back."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Loss, Task
from evenstep.data import GlobalBatch, Microbatch, Position
from evenstep.errors import ReplicaError, TaskError
from evenstep.parallel import Group
from evenstep.train.agreement import check_same_on_all_ranks
from evenstep.train.tasks.task import weight_of
from evenstep.train.update.context import build_transfer
from evenstep.train.update.rollback import Buffers
from evenstep.train.update.weigh import weigh
from kit import Squares
from refused import refused

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Given(Squares):
    def weight(self, batch: Any) -> Any:
        return batch


def batch_of(*items: Any, num_samples: int = 1) -> GlobalBatch:
    microbatches = [Microbatch(index=index, data=item, num_samples=num_samples) for index, item in enumerate(items)]
    return GlobalBatch(
        position=Position(),
        following=Position(batch=1),
        microbatches=tuple(microbatches),
        num_microbatches=len(items),
        num_samples=len(items) * num_samples,
    )


def test_weights_are_summed_and_microbatches_of_weight_zero_have_no_work() -> None:
    weights = weigh({"": Given()}, batch_of(3, 0, torch.tensor(2)), Group())
    assert weights.total == 5
    assert [microbatch.index for microbatch in weights.work] == [0, 2]
    assert weights.each == {0: 3.0, 1: 0.0, 2: 2.0}


@pytest.mark.parametrize("weight", [10**400, 1e308, "three", "3", -1, float("inf")])
def test_a_weight_that_is_no_finite_number_of_at_least_0_is_refused(weight: Any) -> None:
    class Weighs(Squares):
        def weight(self, batch: Any) -> Any:
            return weight

    with pytest.raises(TaskError):
        weight_of(Weighs(), None, 3)


def test_a_batch_without_tensors_needs_a_weight_of_its_own() -> None:
    with refused(TaskError, "weight"):
        Task.weight(Squares(), {"name": "x"})


def test_ranks_of_different_runs_are_refused_by_the_name_of_the_difference() -> None:
    class Two(Group):
        def gather(self, value: Any) -> list[Any]:
            return [value, value | {"seed": 43}]

    check_same_on_all_ranks(Group(), {"seed": 42})
    with refused(ReplicaError, "seed"):
        check_same_on_all_ranks(Two(), {"torch": "2.13", "seed": 42})


@dataclass
class Record:
    x: Tensor
    name: str


class Own:
    """A batch that moves itself."""

    device = "cpu"

    def to(self, device: torch.device) -> "Own":
        moved = Own()
        moved.device = str(device)
        return moved


def test_everything_in_a_batch_moves_and_keeps_its_type() -> None:
    batch = {
        "pair": Pair(torch.zeros(1), [torch.zeros(2), "text"]),
        "ordered": OrderedDict(x=torch.zeros(1)),
        "record": Record(torch.zeros(1), "name"),
        "own": Own(),
        "tuple": (torch.zeros(1), None, 3),
    }
    moved = build_transfer(META)(batch)
    assert isinstance(moved["pair"], Pair) and isinstance(moved["ordered"], OrderedDict)
    assert moved["pair"].x.device == moved["pair"].y[0].device == moved["ordered"]["x"].device == META
    assert moved["pair"].y[1] == "text"
    assert (moved["record"].x.device, moved["record"].name, moved["own"].device) == (META, "name", "meta")
    assert moved["tuple"][1:] == (None, 3)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> None:
        self.calls += 1


@pytest.mark.parametrize("aborted", [1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("model", [nn.BatchNorm1d(2), Counts()])
def test_buffers_are_restored_when_an_update_is_aborted(model: nn.Module, aborted: float | Tensor) -> None:
    buffers = Buffers(model)
    model(torch.randn(8, 2))
    buffers.restore(0.0)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(8, 2))
    assert not all(torch.equal(value, kept[name]) for name, value in model.named_buffers())
    buffers.restore(aborted)
    assert all(torch.equal(value, kept[name]) for name, value in model.named_buffers())


def test_the_loss_of_a_mean_is_its_sum_in_float32_and_0_of_nothing() -> None:
    assert Loss.of_mean(torch.tensor(0.5, dtype=torch.bfloat16), 1001).sum.item() == 500.5
    mean = torch.tensor(float("nan"), requires_grad=True)
    nothing = Loss.of_mean(mean, torch.tensor(0))
    assert nothing.sum.item() == 0 and nothing.weight is None and int(nothing.count) == 0
