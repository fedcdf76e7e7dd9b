"""Sets the learning rate of an update from its number.

The LR of update u is base · schedule(u), with each group's base as it was when the optimizer was built, so nothing
is accumulated, an aborted update changes nothing, and a resumed run needs no saved LR state.
"""

from typing import final

from torch import Tensor
from torch.optim import Optimizer

from evenstep.optim.schedules.schedule import LrSchedule


@final
class LearningRates:
    """The learning rates of an optimizer's groups.

    Args:
        optimizer: whose groups' `lr` are the bases.
        schedule: gives the multiplier of an update.
        updates: the updates of the run, or None where not known.

    Raises:
        ArgumentError: the schedule does not fit a run of `updates`.
    """

    def __init__(self, optimizer: Optimizer, schedule: LrSchedule, updates: int | None) -> None:
        schedule.check(updates)
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedule = schedule
        self._updates = updates
        self._optimizer = optimizer

    def __call__(self, update: int) -> float:
        """Set every group's learning rate for `update`; gives the first group's."""
        factor = self._schedule(update, self._updates)
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        return self._bases[0] * factor
