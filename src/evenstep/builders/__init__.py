"""From a configuration to objects: the name tables, and the parts of a run that they name."""

from evenstep.builders.hooks import build_hooks, build_writers
from evenstep.builders.options import build_checkpointing
from evenstep.builders.parts import Parts, build_parts
from evenstep.builders.pipeline import build_mesh
from evenstep.builders.ranks import build_strategy, joined, rank_device

__all__ = [
    "Parts",
    "build_checkpointing",
    "build_hooks",
    "build_mesh",
    "build_parts",
    "build_strategy",
    "build_writers",
    "joined",
    "rank_device",
]
