"""Tells an LR schedule that follows evaluations of each one.

An evaluation comes after all updates before it have been committed, so going back needs nothing here: what the schedule
remembers is in the checkpoint.
"""

from typing import final

from evenstep.events import EvaluateEnd, Hook
from evenstep.events.hooks.target import MetricTarget
from evenstep.optim.schedules import Plateau


@final
class Follow(Hook):
    """Tells `plateau` of the evaluations that it follows; every evaluation counts, whoever has asked for it.

    Attributes:
        follows: the metric, of which a trainer sees to it that it is evaluated.

    Raises:
        HookError: when an evaluation is made that has no such metric.
    """

    def __init__(self, plateau: Plateau) -> None:
        self._plateau = plateau
        self.follows = MetricTarget(metric=plateau.metric, mode=plateau.mode, min_delta=0.0)

    @property
    def name(self) -> str:
        """Whose behalf it is on."""
        return "Plateau"

    def after_evaluate(self, event: EvaluateEnd) -> None:
        value = self.follows.value(self, event)
        if value is not None:
            self._plateau.evaluated(value, update=event.update)
