"""Plans: what one rank does in one update, as data that is proved before it runs."""

from evenstep.pipeline.action import Action, Layout, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.layers import Layer, Layers
from evenstep.pipeline.lower import executed, forwards, lower
from evenstep.pipeline.pipeline_model import PipelineModel, pipeline_of
from evenstep.pipeline.schedules import SCHEDULES, Schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Layer",
    "Layers",
    "Layout",
    "Op",
    "PipelineModel",
    "Plan",
    "Schedule",
    "check",
    "executed",
    "forwards",
    "lower",
    "pipeline_of",
]
