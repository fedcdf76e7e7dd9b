"""Cutting of batches that do not fit into memory."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import MapData, StreamData
from evenstep.data import Microbatch
from evenstep.data.split import halves
from evenstep.data.tree import num_elements
from evenstep.errors import TaskError
from evenstep.train.cut import SplitLimit
from kit import Squares, filled, flat, points, trainer_of

Pair = namedtuple("Pair", "x y")


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


def test_named_tuples_lists_and_shared_values_are_cut_as_their_kind() -> None:
    shared = torch.zeros(3, 3)
    rest = {"mask": torch.ones(4), "y": torch.ones(4), "table": shared}
    first, second = halves(Pair([torch.arange(4), torch.tensor(7.0)], rest), 4)
    assert isinstance(first, Pair) and first.y["table"] is shared
    assert (first.x[0].tolist(), second.x[0].tolist()) == ([0, 1], [2, 3])
    assert first.x[1] == second.x[1] == 7.0


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
