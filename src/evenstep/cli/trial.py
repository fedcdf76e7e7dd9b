"""What a run is tried with: one update, the first batch of each evaluation, and the metrics that hooks will follow.

It stands in for the parts of a run that would write or take long. What is tried is the run's own.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast, final

from evenstep.config.schema import Config
from evenstep.data import Data, GlobalBatch, Position
from evenstep.data.wrapped import WrappedData
from evenstep.errors import DataError
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
        if not self._is_of_training():
            self._target.check(self)

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and self._is_of_training():
            self._target.check_training(self)

    def after_evaluate(self, event: EvaluateEnd) -> None:
        if not self._is_of_training():
            self._target.value(self, event)

    def _is_of_training(self) -> bool:
        return self._target.evaluation == "train" and "train" not in self.trainer.evaluations


def followers(config: Config) -> list[Hook]:
    """One for each hook of the run that follows a metric."""
    followed = {"Best": config.checkpoint.best, "EarlyStop": config.early_stop}
    return [
        Follows(name, MetricTarget(metric=section.metric, mode=section.mode, min_delta=0.0))
        for name, section in followed.items()
        if section is not None
    ]


@final
class FirstBatch(WrappedData):
    """The first global batch of other data, as an epoch.

    Args:
        name: of the evaluation, for messages.
    """

    def __init__(self, data: Data, *, name: str) -> None:
        super().__init__(data)
        self._name = name

    def through(self, start: Position, read: Callable[[Position], Iterator[GlobalBatch]]) -> Iterator[GlobalBatch]:
        """Give that one.

        Raises:
            DataError: there is none.
        """
        with closing(cast("Any", read(start))) as batches:
            first = next(batches, None)
        if first is None:
            raise DataError(f"the evaluation {self._name} gave no batch at all; look at its length and filters.")
        yield replace(first, ends_epoch=True)

    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        """One."""
        return 1

    @property
    def knows_length(self) -> bool:
        """It does."""
        return True
