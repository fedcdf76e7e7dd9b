"""Ask for a checkpoint every so many updates, epochs or minutes.

The trainer saves at the end of the update. The checkpoint at the end of training is the trainer's own.
"""

from time import monotonic
from typing import final

from evenstep.errors import ArgumentError
from evenstep.events.event import EpochEnd, SaveEnd, TrainBegin, UpdateEnd
from evenstep.events.hook import Hook


@final
class Save(Hook):
    """Asks for a checkpoint after every `every_updates` updates, `every_epochs` epochs or `every_minutes` minutes.

    Args:
        every_updates: the period in updates; None for none.
        every_epochs: the period in epochs; None for none.
        every_minutes: the longest time without any checkpoint, in minutes; None for none.

    Raises:
        ArgumentError: for no period at all, or one that is not positive.

    >>> hook = Save(every_updates=1000, every_minutes=30)
    """

    def __init__(
        self,
        *,
        every_updates: int | None = None,
        every_epochs: int | None = None,
        every_minutes: float | None = None,
    ) -> None:
        if every_updates is None and every_epochs is None and every_minutes is None:
            raise ArgumentError(
                "`Save` needs a period, but has none; set `every_updates`, `every_epochs` or `every_minutes`.",
                field="Save",
            )
        self._every_updates = every_updates
        self._every_epochs = every_epochs
        self._every_minutes = every_minutes
        self._saved_at = monotonic()

    def before_train(self, event: TrainBegin) -> None:
        self._saved_at = monotonic()

    def after_update(self, event: UpdateEnd) -> None:
        updates, minutes = self._every_updates, self._every_minutes
        is_update = updates is not None and event.update % updates == 0
        if event.committed and (is_update or (minutes is not None and monotonic() - self._saved_at >= 60 * minutes)):
            self.trainer.request_save()

    def after_epoch(self, event: EpochEnd) -> None:
        due = event.complete and self._every_epochs and (event.epoch + 1) % self._every_epochs == 0
        if due:
            self.trainer.request_save()

    def after_save(self, event: SaveEnd) -> None:
        self._saved_at = monotonic()  # also if it failed: a full disk is not asked again at each update
