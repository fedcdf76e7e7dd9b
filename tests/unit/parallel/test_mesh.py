"""Places of ranks in a mesh, and what counts once over shards."""

from collections.abc import Callable
from typing import Any

import torch

from evenstep.errors import ArgumentError
from evenstep.parallel import Group, Mesh
from evenstep.parallel.layout import Shards, each_norm, squared_norm
from refused import refused


def test_each_rank_has_a_place_in_one_pipeline_and_one_column(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> tuple[list[int], list[int]]:
        mesh = Mesh.of(group, pipeline=2)
        assert (mesh.data.ranks, mesh.pipeline.ranks) == (3, 2)
        found = mesh.data.gather(group.rank), mesh.pipeline.gather(group.rank)
        assert found[0] == mesh.replicas
        return found

    columns = [[0, 1, 2], [3, 4, 5]]
    assert on_ranks(6, act) == [(columns[rank // 3], [rank % 3, rank % 3 + 3]) for rank in range(6)]


def test_a_number_of_ranks_that_is_not_a_multiple_is_refused() -> None:
    with refused(ArgumentError, "ranks"):
        Mesh.of(Group(), pipeline=2)


OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


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
