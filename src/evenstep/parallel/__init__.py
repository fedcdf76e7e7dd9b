"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from evenstep.parallel.ddp import Ddp
from evenstep.parallel.group import Group, Processes
from evenstep.parallel.ordered import Ordered
from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Spoiled, Strategy

__all__ = ["Ddp", "Group", "Ordered", "Processes", "Single", "Spoiled", "Strategy"]
