from collections.abc import Callable
from typing import Any

from evenstep.errors import ArgumentError
from evenstep.parallel import Group, Mesh
from refused import refused


def test_each_rank_has_a_place_in_one_pipeline_and_one_column(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> tuple[list[int], list[int]]:
        mesh = Mesh.of(group, pipeline=2)
        assert (mesh.data.ranks, mesh.pipeline.ranks) == (3, 2)
        assert (mesh.coordinate("dp"), mesh.coordinate("pp")) == (mesh.data.rank, mesh.pipeline.rank)
        found = mesh.data.gather(group.rank), mesh.pipeline.gather(group.rank)
        assert found == (mesh.lines["dp"], mesh.lines["pp"])
        return found

    columns = [[0, 1, 2], [3, 4, 5]]
    assert on_ranks(6, act) == [(columns[rank // 3], [rank % 3, rank % 3 + 3]) for rank in range(6)]


def test_a_mesh_may_have_more_axes(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> list[list[int]]:
        return list(Mesh(group, {"pp": 2, "dp": 2, "tp": 2}).lines.values())

    assert on_ranks(8, act)[3] == [[3, 7], [1, 3], [2, 3]]


def test_without_a_pipeline_all_ranks_are_replicas(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> tuple[int, int]:
        mesh = Mesh.of(group)
        return mesh.data.ranks, mesh.pipeline.ranks

    assert on_ranks(2, act) == [(2, 1), (2, 1)]


def test_a_number_of_ranks_that_is_not_a_multiple_is_refused() -> None:
    with refused(ArgumentError, "ranks"):
        Mesh.of(Group(), pipeline=2)
