"""Tells an LR schedule that follows evaluations of each one.

An evaluation comes after all updates before it have been committed, so going back needs nothing here: what the schedule
remembers is in the checkpoint.
"""

from typing import final

from evenstep.events import EvaluateEnd, Hook, TrainBegin
from evenstep.events.hooks.target import MetricTarget
from evenstep.optim.schedules import Plateau


@final
class Follow(Hook):
    """Tells `plateau` of the evaluations that it follows; every evaluation counts, whoever has asked for it.

    Raises:
        HookError: when training begins, if there is no such evaluation; when it is made, if it has no such metric.
    """

    def __init__(self, plateau: Plateau) -> None:
        self._plateau, self.metric = plateau, plateau.metric
        self._target = MetricTarget(metric=plateau.metric, mode=plateau.mode, min_delta=0.0)

    @property
    def name(self) -> str:
        """Whose behalf it is on."""
        return "Plateau"

    def before_train(self, event: TrainBegin) -> None:
        self._target.check(self)

    def after_evaluate(self, event: EvaluateEnd) -> None:
        value = self._target.value(self, event)
        if value is not None:
            self._plateau.evaluated(value, update=event.update)
