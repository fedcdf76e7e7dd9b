"""Hooks that request an evaluation or a checkpoint every so many updates, epochs or minutes."""

from math import inf
from time import monotonic
from typing import final

from evenstep.errors import HookError
from evenstep.events.event import EpochEvent, SaveEvent, TrainEvent, UpdateEvent
from evenstep.events.hook import Hook
from evenstep.schema import Count, Positive


@final
class Evaluate(Hook):
    """Requests an evaluation every `every_updates` updates or `every_epochs` epochs.

    The end of the run is always evaluated.

    >>> hook = Evaluate(every_updates=100)
    """

    draws = False

    def __init__(self, *, every_updates: Count | None = None, every_epochs: Count | None = None) -> None:
        self._every_updates = every_updates
        self._every_epochs = every_epochs

    def before_train(self, event: TrainEvent) -> None:
        if not self.trainer.evaluations:
            raise HookError(f"hook `{self.name}` needs `evaluations`; give the trainer some.", field="evaluations")

    def after_update(self, event: UpdateEvent) -> None:
        if _is_update_due(event, self._every_updates):
            self.trainer.request_evaluate()

    def after_epoch(self, event: EpochEvent) -> None:
        if _is_epoch_due(event, self._every_epochs):
            self.trainer.request_evaluate()


@final
class Save(Hook):
    """Requests a checkpoint every `every_updates` updates, `every_epochs` epochs or `every_minutes` minutes.

    The end of the run is always saved.

    >>> hook = Save(every_updates=1000, every_minutes=30)
    """

    draws = False

    def __init__(
        self,
        *,
        every_updates: Count | None = None,
        every_epochs: Count | None = None,
        every_minutes: Positive | None = None,
    ) -> None:
        self._every_updates = every_updates
        self._every_epochs = every_epochs
        self._every_s = inf if every_minutes is None else 60 * every_minutes
        self._saved_at = monotonic()

    def before_train(self, event: TrainEvent) -> None:
        self._saved_at = monotonic()

    def after_update(self, event: UpdateEvent) -> None:
        is_time_up = event.committed and monotonic() - self._saved_at >= self._every_s
        if is_time_up or _is_update_due(event, self._every_updates):
            self.trainer.request_save()

    def after_epoch(self, event: EpochEvent) -> None:
        if _is_epoch_due(event, self._every_epochs):
            self.trainer.request_save()

    def after_save(self, event: SaveEvent) -> None:
        self._saved_at = monotonic()  # also on failure: a full disk is not tried again at each update


def _is_update_due(event: UpdateEvent, every_updates: int | None) -> bool:
    return event.committed and every_updates is not None and event.update % every_updates == 0


def _is_epoch_due(event: EpochEvent, every_epochs: int | None) -> bool:
    return event.complete and every_epochs is not None and (event.epoch + 1) % every_epochs == 0
