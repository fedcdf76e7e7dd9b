"""The small parts of an update: weighing, moving, guarding, diagnosing."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from evenstep.data import GlobalBatch, Microbatch, Position
from evenstep.errors import ReplicaError, TaskError
from evenstep.parallel import Group
from evenstep.train.checks import check_same_on_all_ranks
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.context import build_transfer
from evenstep.train.update.rollback import Buffers
from evenstep.train.update.weigh import weigh
from refused import refused

CPU = torch.device("cpu")
META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    name: str


class Own:
    """A batch that moves itself."""

    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: torch.device) -> "Own":
        moved = Own()
        moved.device = str(device)
        return moved


class Plain(Task):
    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(output.sum())


class Given(Plain):
    def weight(self, batch: Any) -> Any:
        return batch


def batch_of(*items: Any) -> GlobalBatch:
    return GlobalBatch(
        position=Position(),
        following=Position(batch=1),
        microbatches=tuple(Microbatch(index=index, data=item, num_samples=1) for index, item in enumerate(items)),
        num_microbatches=len(items),
        num_samples=len(items),
        ends_epoch=False,
    )


def test_weights_are_summed_and_microbatches_of_weight_zero_have_no_work() -> None:
    weights = weigh({"": Given()}, batch_of(3, 0, torch.tensor(2)), Group())
    assert weights.total == 5
    assert [microbatch.index for microbatch in weights.work] == [0, 2]
    assert weights.each == {0: 3.0, 1: 0.0, 2: 2.0}


def test_ranks_that_describe_different_runs_are_told_what_differs() -> None:
    class Two(Group):
        def gather(self, value: Any) -> list[Any]:
            return [value, value | {"seed": 43}]

    check_same_on_all_ranks(Group(), {"seed": 42})
    with refused(ReplicaError, "seed"):
        check_same_on_all_ranks(Two(), {"torch": "2.13", "seed": 42})


def test_a_late_task_is_not_asked_for_weights() -> None:
    class Late(Given):
        late_weight = True

        def weight(self, batch: Any) -> Any:
            raise AssertionError

    weights = weigh({"": Late()}, batch_of(3, 0), Group())
    assert (weights.total, len(weights.work)) == (2.0, 2)  # they are counted


def test_a_batch_without_tensors_needs_a_weight_of_its_own() -> None:
    with refused(TaskError, "weight"):
        Plain().weight({"name": "x"})


def test_everything_in_a_batch_moves_and_keeps_its_type() -> None:
    batch = {
        "pair": Pair(torch.zeros(1), [torch.zeros(2), "text"]),
        "ordered": OrderedDict(x=torch.zeros(1)),
        "record": Record(torch.zeros(1), "name"),
        "own": Own(),
        "tuple": (torch.zeros(1), None, 3),
    }
    moved = build_transfer(META)(batch)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.device == META
    assert moved["pair"].y[0].device == META
    assert moved["pair"].y[1] == "text"
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["ordered"]["x"].device == META
    assert (moved["record"].x.device, moved["record"].name) == (META, "name")
    assert moved["own"].device == "meta"
    assert moved["tuple"][1:] == (None, 3)


@pytest.mark.parametrize("aborted", [1.0, torch.tensor(1.0)])
def test_running_statistics_are_restored_when_an_update_is_aborted(aborted: float | Tensor) -> None:
    norm = nn.BatchNorm1d(2)
    buffers = Buffers(norm)
    norm(torch.randn(8, 2))
    buffers.restore(0.0)
    kept = {name: value.clone() for name, value in norm.named_buffers()}
    norm(torch.randn(8, 2))
    assert not torch.equal(norm.running_mean, kept["running_mean"])  # type: ignore[arg-type]
    buffers.restore(aborted)
    assert all(torch.equal(value, kept[name]) for name, value in norm.named_buffers())


def test_any_buffer_that_is_changed_in_place_is_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self) -> None:
            self.calls += 1  # type: ignore[operator]

    counts = Counts()
    buffers = Buffers(counts)
    counts()
    buffers.restore(1.0)
    assert counts.calls.item() == 0  # type: ignore[operator]


def test_lists_and_feature_first_and_packed_batches_keep_the_number_of_samples() -> None:
    features_first = {"x": torch.zeros(6, 8), "y": torch.zeros(8)}
    images = [torch.zeros(3, 4, 4) for _ in range(8)]
    packed = pack_sequence([torch.zeros(2 + n, 3) for n in range(8)], enforce_sorted=False)
    for data in (features_first, images, packed, object()):
        batch = batch_of(data)
        batch.microbatches[0].num_samples = 8
        assert weigh({"": Plain()}, batch, Group()).total == 8


def test_the_loss_of_a_mean_is_its_sum_in_float32_and_0_of_nothing() -> None:
    assert Loss.of_mean(torch.tensor(0.5, dtype=torch.bfloat16), 1001).sum.item() == 500.5
    mean = torch.tensor(float("nan"), requires_grad=True)
    nothing = Loss.of_mean(mean, torch.tensor(0))
    assert nothing.sum.item() == 0 and nothing.weight is None and int(nothing.count) == 0


@dataclass
class Counted:
    x: torch.Tensor
    seen: int = field(default=0, init=False)


@pytest.mark.parametrize(
    "given",
    [10**400, 1e308, "three", "3", -1, float("inf")],
    ids=["huge", "large", "text", "a number as text", "negative", "inf"],
)
def test_a_weight_that_is_no_finite_number_of_at_least_0_is_refused_by_name(given: Any) -> None:
    class Weighs(Task):
        loss: Any = None

        def weight(self, batch: Any) -> Any:
            return given

    with pytest.raises(TaskError):
        weight_of(Weighs(), None, 3)
