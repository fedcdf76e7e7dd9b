from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

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
    on_ranks: Callable[..., list[Any]], present: list[tuple[bool, bool]], owners: list[int], ranks: int, blocks: int
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


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_as_many_bytes_are_sent_as_in_a_ring(on_ranks: Callable[..., list[Any]], ranks: int) -> None:
    """2(R - 1)/R of the tensor from each rank, where each rank holds one node."""
    elements = 840
    dealing = Dealing(tuple(range(ranks)), tuple(range(ranks)))

    def act(group: Any) -> int:
        sent = 0
        plain = group.begin_send

        def counted(tensor: Tensor, rank: int, channel: int = 0) -> Any:
            nonlocal sent
            sent += tensor.numel()
            return plain(tensor, rank, channel)

        group.begin_send = counted
        like = torch.empty(0, dtype=torch.bfloat16)  # which two ranks do not add as the backend does
        flat = torch.ones(elements, dtype=like.dtype)
        total = begin_sum(group, dealing, [flat], like=like, elements=elements)()()
        assert torch.equal(total, torch.full_like(flat, float(ranks)))
        return sent

    assert set(on_ranks(ranks, act)) == {2 * (ranks - 1) * elements // ranks}
