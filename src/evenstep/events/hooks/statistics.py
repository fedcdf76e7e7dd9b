"""Numbers about the parameters, per group of the optimizer: learning rate, norm, and relative size of the update.

They stay on the device until they are logged. Gradients are not looked at: their norm is the trainer's own metric.
"""

from typing import Any, final

import torch
from torch import Tensor

from evenstep.events.arguments import require_count
from evenstep.events.event import UpdateBegin, UpdateEnd
from evenstep.events.hook import Hook


@final
class Statistics(Hook):
    """Put train/lr/i, train/param_norm/i = ‖θ‖₂ and train/update_ratio/i = ‖θ_u − θ_{u−1}‖₂ / ‖θ_u‖₂ of group i.

    Args:
        every_updates: at updates that divide by it.
        update_ratio: whether to compute the ratio, which needs a copy of the parameters during those updates.

    Raises:
        ArgumentError: for a period below 1.

    >>> Statistics(every_updates=100).name
    'Statistics'
    """

    def __init__(self, *, every_updates: int = 100, update_ratio: bool = False) -> None:
        require_count("every_updates", every_updates)
        self._every = every_updates
        self._update_ratio = update_ratio
        self._before: list[list[Tensor]] = []

    def before_update(self, event: UpdateBegin) -> None:
        if self._update_ratio and event.update % self._every == 0:
            self._before = [[one.detach().clone() for one in group["params"]] for group in self._groups()]

    def after_update(self, event: UpdateEnd) -> None:
        before, self._before = self._before, []
        if not event.committed or event.update % self._every:
            return
        put, update = self.trainer.storage.put, event.update
        for index, group in enumerate(self._groups()):
            parameters: list[Tensor] = [one.detach() for one in group["params"]]
            norm = _norm(parameters)
            put(f"train/lr/{index}", group["lr"], update=update)
            put(f"train/param_norm/{index}", norm, update=update)
            if before:
                change = _norm([new - old for new, old in zip(parameters, before[index], strict=True)])
                put(f"train/update_ratio/{index}", change, norm, update=update)

    def _groups(self) -> list[dict[str, Any]]:
        return self.trainer.optimizer.param_groups


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors)
