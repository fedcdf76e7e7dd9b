"""Ask for an evaluation every so many updates or epochs.

The trainer evaluates, at the end of the update, all that it was given as evaluations. The evaluation at the end of
training is the trainer's own.
"""

from collections.abc import Iterable
from typing import final

from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import EpochEnd, TrainBegin, UpdateEnd
from evenstep.events.hook import Hook


@final
class Evaluate(Hook):
    """Asks for an evaluation after every `every_updates` updates, or `every_epochs` epochs.

    Args:
        every_updates: the period in updates; None for none.
        every_epochs: the period in epochs; None for none.
        from_update: the first update after which it asks, so `Best` and others that follow evaluations begin there. The
            evaluation at the end of the run is always made.

    Raises:
        ArgumentError: for no period at all, one below 1, or a first update below 0.

    >>> hook = Evaluate(every_updates=100)
    """

    def __init__(
        self, *, every_updates: int | None = None, every_epochs: int | None = None, from_update: int = 0
    ) -> None:
        if every_updates is None and every_epochs is None:
            raise ArgumentError(
                "`Evaluate` needs a period, but has none; set `every_updates` or `every_epochs`.", field="Evaluate"
            )
        self._from_update = from_update
        self._every_updates = every_updates
        self._every_epochs = every_epochs

    def before_train(self, event: TrainBegin) -> None:
        if not self.trainer.evaluations:
            raise HookError(
                f"hook `{self.name}` has nothing to evaluate on; give the trainer `evaluations`, or leave the hook out."
            )

    def after_update(self, event: UpdateEnd) -> None:
        due = event.committed and self._every_updates and event.update % self._every_updates == 0
        if due and event.update >= self._from_update:
            self.trainer.request_evaluate()

    def after_epoch(self, event: EpochEnd) -> None:
        due = event.complete and self._every_epochs and (event.epoch + 1) % self._every_epochs == 0
        if due and event.update >= self._from_update:
            self.trainer.request_evaluate()


def may_be_asked_for(hooks: Iterable[Hook | None]) -> bool:
    """Whether any of these hooks asks for evaluations during a run; one that evenstep has not made may.

    >>> may_be_asked_for([Evaluate(every_epochs=1)]), may_be_asked_for([None])
    (True, False)
    """
    given = [one for one in hooks if one is not None]
    return any(isinstance(one, Evaluate) or not type(one).__module__.startswith("evenstep.") for one in given)
