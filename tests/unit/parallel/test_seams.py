"""The two seams between an update and its ranks stay narrow, and their powers are asked for, not assumed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.parallel import (
    Ddp,
    Fsdp,
    Group,
    Single,
    Strategy,
    Zero1,
)
from evenstep.parallel.layout import Shards, each_norm, squared_norm

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
MADE: list[Callable[[Group], Strategy]] = [
    Single,
    partial(Ddp, reduction="fast"),
    Ddp,
    partial(Fsdp, reduction="fast"),
    Fsdp,
    lambda group: Zero1(group, reduction="fast"),
]


@pytest.mark.parametrize("make", MADE)
def test_a_reducer_belongs_to_one_stage(make: Callable[[Group], Strategy]) -> None:
    strategy, modules = make(Group()), [nn.Linear(1, 1), nn.Linear(1, 1)]
    one, other = (strategy.reducer(module, per_plan=True) for module in modules)
    assert one is not other
    assert [one.module, other.module] == modules


def test_what_every_rank_holds_whole_counts_once_in_sums_over_shards(on_ranks: OnRanks) -> None:
    """A parameter of a single number is not cut; ranks beyond the first copy of the shards count nothing."""

    def act(group: Any, num_shards: int) -> Any:
        layout = Shards(group, num_shards=num_shards)
        numbers = [torch.tensor([3.0]), torch.tensor(4.0)]
        return (
            squared_norm(layout, numbers, lambda some: torch.stack([one.norm() for one in some])),
            each_norm(layout, numbers, lambda some: torch.stack([one.norm() for one in some])),
            (layout.shard_index, layout.num_shards),
        )

    for num_shards in (2, 4):
        for rank, (squared, each, held) in enumerate(on_ranks(4, lambda group, n=num_shards: act(group, n))):
            assert squared == 25 and each.tolist() == [3, 4]
            assert held == (rank % num_shards, num_shards)
