"""Learning rate, parameter norm and size of the update by group; gradient norms by layer.

Norms are those of the whole model, over shards and stages. They stay on the device until metrics are read.
"""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from evenstep.events.event import StepBegin, UpdateBegin, UpdateEnd
from evenstep.events.hook import Hook
from evenstep.schema import Count
from evenstep.tensors import named_parameters


@final
class Statistics(Hook):
    """Logs train/lr/i, train/param_norm/i = ‖θ‖₂ and train/update_ratio/i = ‖θ_u − θ_{u−1}‖₂ / ‖θ_u‖₂ of group i.

    Also train/grad_norm/LAYER = ‖g‖₂ over the parameters of the module of that name, before clipping.

    Args:
        every_updates: period in updates.
        update_ratio: log the ratio, which needs a copy of the parameters during the update.
        gradient_norms: log the norms of the layers' gradients.

    >>> hook = Statistics(every_updates=100, gradient_norms=True)
    """

    draws = False
    may_evaluate = False

    def __init__(self, *, every_updates: Count = 100, update_ratio: bool = False, gradient_norms: bool = False) -> None:
        self._every = every_updates
        self._before: list[dict[str, Tensor]] = []
        # the methods of the base are not called
        if not update_ratio:
            self.before_update = super().before_update
        if not gradient_norms:
            self.before_step = super().before_step

    def before_update(self, event: UpdateBegin) -> None:
        if event.update % self._every == 0:
            self._before = [{name: one.clone() for name, one in group.items()} for group in self._groups()]

    def before_step(self, event: StepBegin) -> None:
        if event.update % self._every:
            return
        parameters = named_parameters(self.trainer.model)
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        layers: dict[str, list[Tensor]] = {}
        for name, norm in self.trainer.norms(gradients).items():
            layers.setdefault(name.rpartition(".")[0] or name, []).append(norm)
        for layer, norms in layers.items():
            self.trainer.storage.put(f"train/grad_norm/{layer}", _norm(norms) / event.divisor, update=event.update)

    def after_update(self, event: UpdateEnd) -> None:
        before = self._before
        self._before = []
        if not event.committed or event.update % self._every:
            return
        put, update = self.trainer.storage.put, event.update
        for number, group in enumerate(self._groups()):
            rate = self.trainer.optimizer.param_groups[number].get("lr")
            if rate is not None:
                put(f"train/lr/{number}", rate, update=update)
            norm = _norm(self.trainer.norms(group).values())
            put(f"train/param_norm/{number}", norm, update=update)
            if before:
                changes = {name: new - before[number][name] for name, new in group.items()}
                change = _norm(self.trainer.norms(changes).values())
                put(f"train/update_ratio/{number}", change, norm, update=update)

    def _groups(self) -> list[dict[str, Tensor]]:
        parameters = named_parameters(self.trainer.model)
        return [{name: parameters[name].detach() for name in names} for names in self.trainer.group_names]


def _norm(norms: Iterable[Tensor]) -> Tensor:
    parts = list(norms)
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros(())
