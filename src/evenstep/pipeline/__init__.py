"""Plans: what one rank does in one update, as data that is proved before it runs."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names
from evenstep.pipeline.check import check
from evenstep.pipeline.lower import executed, forwards, lower

if TYPE_CHECKING:
    from evenstep.pipeline.action import Action, Op, Plan
    from evenstep.pipeline.layers import Layer, Layers
    from evenstep.pipeline.layout import Layout
    from evenstep.pipeline.pipeline_model import PipelineModel, StageModule, pipeline_of
    from evenstep.pipeline.runner import Runner, build_runner
    from evenstep.pipeline.schedules import SCHEDULES, Schedule
    from evenstep.pipeline.stage import PlanStep, Stage

__all__ = [
    "SCHEDULES",
    "Action",
    "Layer",
    "Layers",
    "Layout",
    "Op",
    "PipelineModel",
    "Plan",
    "PlanStep",
    "Runner",
    "Schedule",
    "Stage",
    "StageModule",
    "build_runner",
    "check",
    "executed",
    "forwards",
    "lower",
    "pipeline_of",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".action": "Action Op Plan",
        ".layers": "Layer Layers",
        ".layout": "Layout",
        ".runner": "Runner build_runner",
        ".schedules": "SCHEDULES Schedule",
        ".stage": "Stage PlanStep",
        ".pipeline_model": "PipelineModel StageModule pipeline_of",
    },
)
