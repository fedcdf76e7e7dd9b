"""Sums of gradients over ranks, in their order and in buckets."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp
from evenstep.parallel.blocks import Dealing, Gradients, Place, added, begin_sum, blocks_of, hold, packed

PARAMETERS = [torch.zeros(3), torch.zeros(2, 2)]


def gradients(microbatch: int, present: tuple[bool, bool]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(microbatch)
    made = [torch.randn(p.shape, generator=generator) * 10 ** (microbatch % 5) for p in PARAMETERS]
    return [g if has else None for g, has in zip(made, present, strict=True)]


def in_tree(leaves: list[Any]) -> Any:
    """The sum as the docstring draws it, level by level; None is no summand."""
    while len(leaves) > 1:
        leaves = [*leaves, None] if len(leaves) % 2 else leaves
        leaves = [a if b is None else b if a is None else a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def in_blocks(leaves: list[Any], blocks: tuple[int, ...]) -> Any:
    """The sum of blocks in the tree; in each block micro-batches are added one after the other."""
    sums: dict[int, Any] = {}
    for block, leaf in zip(blocks, leaves, strict=True):
        earlier = sums.get(block)
        sums[block] = leaf if earlier is None else earlier if leaf is None else earlier + leaf
    return in_tree(list(sums.values()))


def flats_of(held: dict[Place, Gradients], dealing: Dealing, rank: int) -> list[Tensor]:
    sizes = [p.numel() for p in PARAMETERS]
    nodes = [dealing.combine(held, place, added) or [None, None] for place in dealing.nodes_of(rank)]
    return [packed(node, sizes, torch.empty(0)) for node in nodes]


@given(
    present=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=13),
    owners=st.lists(st.integers(-1, 3), min_size=13, max_size=13),
    ranks=st.integers(1, 4),
    blocks=st.integers(1, 14),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_sum_has_the_same_bits_whoever_runs_which_microbatches(
    on_ranks: Any, present: list[tuple[bool, bool]], owners: list[int], ranks: int, blocks: int
) -> None:
    count = len(present)
    dealing = Dealing(tuple(min(owner, ranks - 1) for owner in owners[:count]), tuple(blocks_of(count, blocks)))

    def act(group: Any) -> Any:
        held: dict[Place, Gradients] = {}
        own: list[Tensor | None] | None = None
        ends = dealing.ends_of(group.rank)
        for microbatch, owner in enumerate(dealing.owners):
            if owner == group.rank:
                new = gradients(microbatch, present[microbatch])
                own = new if own is None else added(own, new)
                if microbatch in ends:
                    hold(held, ends[microbatch], own)
                    own = None
        return begin_sum(group, dealing, flats_of(held, dealing, group.rank), like=torch.empty(0), elements=7)()()

    leaves = [[None] * 2 if owner < 0 else gradients(k, present[k]) for k, owner in enumerate(dealing.owners)]
    wanted = packed(
        [in_blocks([leaf[part] for leaf in leaves], dealing.blocks) for part in range(2)], [3, 4], torch.empty(0)
    )
    for total in on_ranks(ranks, act):
        assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))


class Heads(nn.Module):
    """A trunk and two heads, of which a micro-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh()).sum()


def heads(seed: int) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    model = Heads().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("more", [{"sparse": True}, {"max_norm": 0.5}])
def test_embeddings_that_each_rank_would_change_by_itself_are_refused(on_ranks: Any, more: Any) -> None:
    def act(group: Any) -> None:
        with pytest.raises(ArgumentError):
            Ddp(group).reducer(nn.Sequential(nn.Embedding(3, 2, **more))).wrap()

    on_ranks(2, act)
