"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.parallel.blocks import Dealing
    from evenstep.parallel.fsdp import Fsdp
    from evenstep.parallel.group import Group
    from evenstep.parallel.layout import ParameterLayout, ShardedTensorRef, States, each_norm, mapped, squared_norm
    from evenstep.parallel.mesh import Mesh
    from evenstep.parallel.named import device_of_rank, launched_group, strategy_named
    from evenstep.parallel.processes import Processes
    from evenstep.parallel.rank_info import RankInfo, rank_info_of
    from evenstep.parallel.reducer import Reducer
    from evenstep.parallel.reducers import Reducers
    from evenstep.parallel.strategies import Ddp, Single, Strategy, Zero1

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".blocks": "Dealing",
        ".group": "Group",
        ".layout": "ParameterLayout ShardedTensorRef States each_norm mapped squared_norm",
        ".mesh": "Mesh",
        ".named": "device_of_rank launched_group strategy_named",
        ".processes": "Processes",
        ".rank_info": "RankInfo rank_info_of",
        ".fsdp": "Fsdp",
        ".reducer": "Reducer",
        ".reducers": "Reducers",
        ".strategies": "Ddp Single Strategy Zero1",
    },
)
