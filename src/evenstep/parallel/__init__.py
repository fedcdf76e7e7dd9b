"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from evenstep.parallel.compression import Bf16, Compression, Fp16
from evenstep.parallel.ddp import Ddp
from evenstep.parallel.group import Group, Processes
from evenstep.parallel.ordered import Ordered
from evenstep.parallel.place import Place, place_of
from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Strategy

__all__ = [
    "Bf16",
    "Compression",
    "Ddp",
    "Fp16",
    "Group",
    "Ordered",
    "Place",
    "Processes",
    "Single",
    "Strategy",
    "place_of",
]
