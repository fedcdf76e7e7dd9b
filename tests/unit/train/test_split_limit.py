from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import MapData, StreamData, Task, Trainer
from evenstep.data import Microbatch
from evenstep.data.split import halves
from evenstep.data.tree import num_elements
from evenstep.errors import TaskError
from evenstep.train.cut import SplitLimit

Pair = namedtuple("Pair", "x y")


class Count(Task):
    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        raise AssertionError("not called")


def whole(batch: Any) -> Microbatch:
    return Microbatch(index=0, data=batch, num_samples=0, counted=False)


@given(samples=st.integers(1, 40), width=st.integers(1, 5), limit=st.integers(1, 250))
def test_pieces_are_the_samples_in_order_and_within_the_limit_or_single(samples: int, width: int, limit: int) -> None:
    batch = {"x": torch.arange(samples * width).view(samples, width), "names": [str(n) for n in range(samples)]}
    pieces = SplitLimit(limit).pieces(Count(), whole(batch))
    assert torch.equal(torch.cat([piece.data["x"] for piece in pieces]), batch["x"])
    assert [name for piece in pieces for name in piece.data["names"]] == batch["names"]
    assert all(num_elements(piece.data) <= limit or len(piece.data["x"]) == 1 for piece in pieces)
    assert len({piece.part for piece in pieces}) == len(pieces)


@given(samples=st.integers(2, 40), width=st.integers(1, 5))
def test_a_failed_piece_is_never_tried_at_its_size_again(samples: int, width: int) -> None:
    cuts, batch = SplitLimit(), torch.zeros(samples, width)
    for _ in range(samples):
        piece = max(cuts.pieces(Count(), whole(batch)), key=lambda one: num_elements(one.data))
        if cuts.can_be_cut(Count(), piece):
            cuts.cut_finer(Count(), piece)
        assert all(num_elements(one.data) <= (cuts.limit or 0) for one in cuts.pieces(Count(), whole(batch)))
    assert [len(piece.data) for piece in cuts.pieces(Count(), whole(batch))] == [1] * samples


def test_named_tuples_lists_and_shared_values_are_cut_as_their_kind() -> None:
    shared = torch.zeros(3, 3)
    first, second = halves(
        Pair([torch.arange(4), torch.tensor(7.0)], {"mask": torch.ones(4), "y": torch.ones(4), "table": shared})
    )
    assert isinstance(first, Pair)
    assert first.x[0].tolist() == [0, 1]
    assert second.x[0].tolist() == [2, 3]
    assert first.x[1] == second.x[1] == 7.0
    assert first.y["table"] is shared


def test_parts_that_do_not_weigh_what_the_whole_does_are_refused() -> None:
    class Once(Count):
        def weight(self, batch: Any) -> float:
            return 1.0

    with pytest.raises(TaskError):
        SplitLimit(2).pieces(Once(), whole(torch.zeros(4)))


def test_collated_pairs_are_split_in_two_where_memory_is_short() -> None:
    """They are a list of two tensors of two rows each, which could be two samples as well."""

    class Square(Task):
        def loss(self, output: Any, batch: Any) -> torch.Tensor:
            return (output - batch[1]).square().sum()

    class Small(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if len(input) > 1 and self.training:
                raise torch.OutOfMemoryError("no room for two")
            return super().forward(input)

    pairs = [(torch.tensor([1.0, number]), torch.tensor([2.0 * number])) for number in range(6)]
    weights: list[torch.Tensor] = []
    for data in (MapData(pairs, global_batch_size=6, micro_batch_size=2), StreamData(pairs, global_batch_size=6)):
        for kind in (torch.nn.Linear, Small):
            torch.manual_seed(0)
            model = kind(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            Trainer(model=model, task=Square(), optimizer=optimizer, data=data, updates=1, device="cpu").train()
            weights.append(model.weight.detach())
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0])
