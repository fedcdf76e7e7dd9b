"""Plans: what one rank does in one update, as data that is proved before it runs."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names
from evenstep.pipeline.check import check
from evenstep.pipeline.lower import forwards, lower

if TYPE_CHECKING:
    from evenstep.pipeline.action import Action, Op, Plan
    from evenstep.pipeline.layers import Cuttable, Layer, Layers
    from evenstep.pipeline.layout import Layout
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".action": "Action Op Plan",
        ".layers": "Cuttable Layer Layers",
        ".layout": "Layout",
        ".runner": "Passage Runner",
        ".schedules": "SCHEDULES Schedule",
        ".section": "Section",
        ".stage": "Stage",
        ".staged": "Staged",
        ".stages": "Stages",
    },
)
