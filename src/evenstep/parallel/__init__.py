"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from evenstep.parallel.blocks import Dealing
from evenstep.parallel.group import Group, Mesh
from evenstep.parallel.layout import ParameterLayout, ShardedTensorRef, States, each_norm, mapped, squared_norm
from evenstep.parallel.processes import Processes, device_of_rank, launched_group
from evenstep.parallel.rank_info import RankInfo, rank_info_of
from evenstep.parallel.reducer import Reducer
from evenstep.parallel.strategies import Ddp, Fsdp, Reducers, Single, Strategy, Zero1, strategy_named

__all__ = [
    "Ddp",
    "Dealing",
    "Fsdp",
    "Group",
    "Mesh",
    "ParameterLayout",
    "Processes",
    "RankInfo",
    "Reducer",
    "Reducers",
    "ShardedTensorRef",
    "Single",
    "States",
    "Strategy",
    "Zero1",
    "device_of_rank",
    "each_norm",
    "launched_group",
    "mapped",
    "rank_info_of",
    "squared_norm",
    "strategy_named",
]
