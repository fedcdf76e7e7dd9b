"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.parallel.compression import COMPRESSIONS, Bf16, Compression, Fp16
    from evenstep.parallel.ddp import Ddp
    from evenstep.parallel.elastic import Elastic
    from evenstep.parallel.fsdp import Fsdp
    from evenstep.parallel.group import Group, Processes
    from evenstep.parallel.lighthouse import ADDRESS, COUNT, NUMBER, SILENT_S, Lighthouse, Seat, coordination, seat_of
    from evenstep.parallel.mesh import Mesh
    from evenstep.parallel.named import device_of_rank, launched_group, strategy_named
    from evenstep.parallel.ordered import Ordered
    from evenstep.parallel.ordered_fsdp import OrderedFsdp
    from evenstep.parallel.per_stage import PerStage, of_stages
    from evenstep.parallel.place import Place, place_of
    from evenstep.parallel.replicas import bits
    from evenstep.parallel.single import Single
    from evenstep.parallel.strategy import Owned, Spoiled, States, Strategy, mapped
    from evenstep.parallel.zero1 import Zero1

__all__ = [
    "ADDRESS",
    "COMPRESSIONS",
    "COUNT",
    "NUMBER",
    "SILENT_S",
    "Bf16",
    "Compression",
    "Ddp",
    "Elastic",
    "Fp16",
    "Fsdp",
    "Group",
    "Lighthouse",
    "Mesh",
    "Ordered",
    "OrderedFsdp",
    "Owned",
    "PerStage",
    "Place",
    "Processes",
    "Seat",
    "Single",
    "Spoiled",
    "States",
    "Strategy",
    "Zero1",
    "bits",
    "coordination",
    "device_of_rank",
    "launched_group",
    "mapped",
    "of_stages",
    "place_of",
    "seat_of",
    "strategy_named",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".compression": "COMPRESSIONS Bf16 Compression Fp16",
        ".ddp": "Ddp",
        ".elastic": "Elastic",
        ".fsdp": "Fsdp",
        ".group": "Group Processes",
        ".lighthouse": "ADDRESS COUNT NUMBER SILENT_S Lighthouse Seat coordination seat_of",
        ".mesh": "Mesh",
        ".named": "device_of_rank launched_group strategy_named",
        ".ordered": "Ordered",
        ".ordered_fsdp": "OrderedFsdp",
        ".per_stage": "PerStage of_stages",
        ".place": "Place place_of",
        ".replicas": "bits",
        ".single": "Single",
        ".strategy": "Owned Spoiled States Strategy mapped",
        ".zero1": "Zero1",
    },
)
