"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from evenstep.parallel.ddp import Ddp
from evenstep.parallel.group import Group, Processes
from evenstep.parallel.mesh import Mesh
from evenstep.parallel.ordered import Ordered
from evenstep.parallel.per_stage import PerStage
from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Strategy

__all__ = ["Ddp", "Group", "Mesh", "Ordered", "PerStage", "Processes", "Single", "Strategy"]
