"""What a run is tried with: one update, and the metrics that hooks will follow.

It stands in for the parts of a run that would write or take long. What is tried is the run's own.
"""

from typing import final

from evenstep.config.schema import Config
from evenstep.events import EvaluateEnd, Hook, TrainBegin, TrainEnd, UpdateBegin, UpdateEnd
from evenstep.events.hooks.target import MetricTarget


@final
class OneUpdate(Hook):
    """Stop after one update, and remember how it was cut and what was evaluated."""

    def __init__(self) -> None:
        self.num_microbatches = 0
        self.num_samples = 0
        self.evaluated: dict[str, dict[str, float]] = {}

    def before_update(self, event: UpdateBegin) -> None:
        self.num_microbatches = event.num_microbatches

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed:  # not where a loss scale was too high, or a batch was given up
            self.num_samples = event.num_samples
            self.trainer.request_stop("checked")

    def after_evaluate(self, event: EvaluateEnd) -> None:
        self.evaluated[event.name] = dict(event.metrics)


@final
class Follows(Hook):
    """Looks for the metric that another hook will follow, with the words of that hook."""

    def __init__(self, of: str, target: MetricTarget) -> None:
        self._of, self._target = of, target

    @property
    def name(self) -> str:
        return self._of

    def before_train(self, event: TrainBegin) -> None:
        if not self._target.is_of_training(self):
            self._target.check(self)

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and self._target.is_of_training(self):
            self._target.check_training(self)

    def after_evaluate(self, event: EvaluateEnd) -> None:
        if not self._target.is_of_training(self):
            self._target.value(self, event)


def followers(config: Config) -> list[Hook]:
    """One for each hook of the run that follows a metric."""
    followed = {"Best": config.checkpoint.best, "EarlyStop": config.early_stop}
    return [
        Follows(name, MetricTarget(metric=section.metric, mode=section.mode, min_delta=0.0))
        for name, section in followed.items()
        if section is not None
    ]
