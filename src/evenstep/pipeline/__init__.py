"""Plans: what one rank does in one update, as data that is proved before it runs."""

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.runner import Passage, Runner
from evenstep.pipeline.schedules.sequential import forwards, sequential
from evenstep.pipeline.stage import Stage

__all__ = ["Action", "Op", "Passage", "Plan", "Runner", "Stage", "check", "forwards", "sequential"]
