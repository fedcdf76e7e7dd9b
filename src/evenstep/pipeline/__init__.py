"""Plans: what one rank does in one update, as data that is proved before it runs."""

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.lower import forwards, lower
from evenstep.pipeline.runner import Passage, Runner
from evenstep.pipeline.schedules import SCHEDULES, Schedule
from evenstep.pipeline.stage import Stage

__all__ = [
    "SCHEDULES",
    "Action",
    "Layout",
    "Op",
    "Passage",
    "Plan",
    "Runner",
    "Schedule",
    "Stage",
    "check",
    "forwards",
    "lower",
]
