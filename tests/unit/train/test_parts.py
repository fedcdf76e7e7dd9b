"""The small parts of an update: weighing, moving, rolling buffers back."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Loss, MapData, StreamData, Task
from evenstep.data import Microbatch
from evenstep.data.tree import num_elements
from evenstep.errors import ReplicaError, TaskError
from evenstep.parallel import Group
from evenstep.train.agreement import check_same_on_all_ranks
from evenstep.train.cut import SplitLimit
from evenstep.train.tasks.task import weight_of
from evenstep.train.update.microbatch import build_transfer
from kit import Squares, filled, flat, points, trainer_of
from refused import refused

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("weight", [10**400, 1e308, "three", -1, float("inf")])
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


def test_the_loss_of_a_mean_is_its_sum_in_float32_and_0_of_nothing() -> None:
    assert Loss.of_mean(torch.tensor(0.5, dtype=torch.bfloat16), 1001).sum.item() == 500.5
    mean = torch.tensor(float("nan"), requires_grad=True)
    nothing = Loss.of_mean(mean, torch.tensor(0))
    assert nothing.sum.item() == 0 and nothing.weight is None and int(nothing.count) == 0


def whole(batch: Any) -> Microbatch:
    return Microbatch(index=0, data=batch, num_samples=0, counted=False)


@given(samples=st.integers(1, 40), width=st.integers(1, 5), limit=st.integers(1, 250))
def test_pieces_are_the_samples_in_order_and_within_the_limit_or_single(samples: int, width: int, limit: int) -> None:
    batch = {"x": torch.arange(samples * width).view(samples, width), "names": [str(n) for n in range(samples)]}
    pieces = SplitLimit(limit).pieces(Squares(), whole(batch))
    assert torch.equal(torch.cat([piece.data["x"] for piece in pieces]), batch["x"])
    assert [name for piece in pieces for name in piece.data["names"]] == batch["names"]
    assert all(num_elements(piece.data) <= limit or len(piece.data["x"]) == 1 for piece in pieces)
    assert len({piece.part for piece in pieces}) == len(pieces)


@settings(max_examples=15)
@given(samples=st.integers(2, 20), width=st.integers(1, 5))
def test_a_failed_piece_is_never_tried_at_its_size_again(samples: int, width: int) -> None:
    cuts, task, batch = SplitLimit(), Squares(), whole(torch.zeros(samples, width))
    for _ in range(samples):
        piece = max(cuts.pieces(task, batch), key=lambda one: num_elements(one.data))
        if cuts.can_be_cut(task, piece):
            cuts.cut_finer(task, piece)
        assert all(num_elements(one.data) <= (cuts.limit or 0) for one in cuts.pieces(task, batch))
    assert [len(piece.data) for piece in cuts.pieces(task, batch)] == [1] * samples


def test_parts_whose_weights_do_not_add_up_to_that_of_the_whole_are_refused() -> None:
    class Once(Squares):
        def weight(self, batch: Any) -> float:
            return 1.0

    with pytest.raises(TaskError):
        SplitLimit(2).pieces(Once(), whole(torch.zeros(4)))


class Small(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 1 and self.training:
            raise torch.OutOfMemoryError("injected")
        return super().forward(input)


@pytest.mark.parametrize("kind", [MapData, StreamData])
def test_collated_pairs_are_split_in_two_where_memory_is_short(kind: Any) -> None:
    """They are a list of two tensors of two rows each, which could be two samples as well."""
    ends: list[Tensor] = []
    for layer in (nn.Linear, Small):
        model = filled(layer(3, 1).double())
        some = kind(points(6), global_batch_size=6, micro_batch_size=2)
        trainer_of(model, data=some, updates=1).train()
        ends.append(flat(model))
    torch.testing.assert_close(*ends)
