"""Places of ranks: what launchers say, meshes, and what counts once over shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Group, Mesh
from evenstep.parallel.fsdp import units, with_forward
from evenstep.parallel.layout import Shards, each_norm, squared_norm
from evenstep.parallel.rank_info import RankInfo, rank_info_of
from refused import refused


def test_each_rank_has_a_place_in_one_pipeline_and_one_column(on_ranks: Any) -> None:
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


def test_what_every_rank_holds_whole_counts_once_in_sums_over_shards(on_ranks: Any) -> None:
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


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
}


def test_torchruns_variables_are_read() -> None:
    assert rank_info_of(TORCHRUN) == RankInfo(rank=3, ranks=4, local_rank=1, address="alpha", port=29500)
    served = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = rank_info_of(served)
    assert place is not None and place.store_is_served and place.attempt == 2


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("RANK", "one"), ("MASTER_ADDR", " ")])
def test_an_environment_that_cannot_be_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        rank_info_of(TORCHRUN | {name: value})


def test_what_srun_sets_is_read() -> None:
    place = rank_info_of(SRUN)
    assert place is not None
    assert (place.rank, place.ranks, place.local_rank, place.address) == (5, 8, 1, "gpu07")
    assert place.port == rank_info_of(SRUN | {"SLURM_PROCID": "0"}).port  # type: ignore[union-attr] - the same for all
    assert place.port != rank_info_of(SRUN | {"SLURM_JOB_ID": "124"}).port  # type: ignore[union-attr]


def test_torchrun_inside_srun_counts_and_so_does_an_address_of_ones_own() -> None:
    assert rank_info_of(SRUN | TORCHRUN) == rank_info_of(TORCHRUN)
    place = rank_info_of(SRUN | {"MASTER_ADDR": "beta", "MASTER_PORT": "1234"})
    assert place is not None and (place.address, place.port) == ("beta", 1234)


def test_neither_a_lonely_process_nor_a_batch_script_is_a_rank() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    for variables in ({}, {"MASTER_ADDR": "alpha", "LOCAL_RANK": "0"}, batch):
        assert rank_info_of(variables) is None


def nested() -> tuple[nn.Module, list[nn.Module]]:
    block = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    blocks = nn.ModuleList([block, nn.Linear(2, 2), nn.Tanh()])
    return nn.ModuleDict({"first": nn.Linear(2, 2), "blocks": blocks}), [blocks[0], blocks[1]]


def without_a_forward() -> tuple[nn.Module, list[nn.Module]]:
    pair = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.ModuleList([nn.Linear(2, 2)])})
    blocks = nn.ModuleList([pair, nn.Linear(2, 2)])
    return nn.ModuleDict({"blocks": blocks}), [pair["one"], pair["two"][0], blocks[1]]


def shared() -> tuple[nn.Module, list[nn.Module]]:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.ModuleDict({"blocks": layers, "out": nn.Linear(2, 2)})
    model["out"].weight = layers[0].weight
    return model, [layers[1]]


def sequential() -> tuple[nn.Module, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return model, [model[0], model[2]]


@pytest.mark.parametrize("made", [nested, without_a_forward, shared, sequential, lambda: (nn.Linear(2, 2), [])])
def test_the_units_are_the_items_of_the_outermost_lists(made: Callable[[], tuple[nn.Module, list[nn.Module]]]) -> None:
    model, wanted = made()
    assert units(model) == wanted


def test_a_stage_is_gathered_layer_by_layer_wherever_its_layers_are_in_the_model() -> None:
    stage, blocks = nn.Module(), nn.Module()
    stage.add_module("blocks", blocks)
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blocks.add_module("3", block)
    head = nn.Linear(2, 2)
    stage.add_module("head", head)
    assert list(with_forward(stage)) == [block, head]
