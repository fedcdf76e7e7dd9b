"""From a configuration to objects: the name tables, and the parts of a run that they name."""

from evenstep.builders.evaluated import evaluated_weights
from evenstep.builders.options import build_checkpointing, build_hooks
from evenstep.builders.parts import RunParts, build_parts, make_model
from evenstep.builders.pipeline import build_mesh, check_stages
from evenstep.builders.ranks import build_strategy, joined, ranks_of
from evenstep.builders.run import open_run

__all__ = [
    "RunParts",
    "build_checkpointing",
    "build_hooks",
    "build_mesh",
    "build_parts",
    "build_strategy",
    "check_stages",
    "evaluated_weights",
    "joined",
    "make_model",
    "open_run",
    "ranks_of",
]
