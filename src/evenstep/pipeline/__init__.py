"""Plans: what one rank does in one update, as data that is proved before it runs."""

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.layers import Cuttable, Layer, Layers
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.lower import executed, forwards, lower
from evenstep.pipeline.runner import Runner
from evenstep.pipeline.schedules import SCHEDULES, Schedule
from evenstep.pipeline.stage import Stage, Step
from evenstep.pipeline.stage_module import StageModule
from evenstep.pipeline.staged import Staged
from evenstep.pipeline.stages import build_runner

__all__ = [
    "SCHEDULES",
    "Action",
    "Cuttable",
    "Layer",
    "Layers",
    "Layout",
    "Op",
    "Plan",
    "Runner",
    "Schedule",
    "Stage",
    "StageModule",
    "Staged",
    "Step",
    "build_runner",
    "check",
    "executed",
    "forwards",
    "lower",
]
