"""Plans: what one rank does in one update, as data that is proved before it runs."""

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.layers import Cuttable, Layer, Layers
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.lower import forwards, lower
from evenstep.pipeline.runner import Passage, Runner
from evenstep.pipeline.schedules import SCHEDULES, Schedule
from evenstep.pipeline.section import Section
from evenstep.pipeline.stage import Stage
from evenstep.pipeline.staged import Staged
from evenstep.pipeline.stages import Stages

__all__ = [
    "SCHEDULES",
    "Action",
    "Cuttable",
    "Layer",
    "Layers",
    "Layout",
    "Op",
    "Passage",
    "Plan",
    "Runner",
    "Schedule",
    "Section",
    "Stage",
    "Staged",
    "Stages",
    "check",
    "forwards",
    "lower",
]
