"""Numbers about the parameters: norms of gradients by layer; learning rate, norm and size of the update by group.

Norms are those of the whole model, over shards and stages of any strategy. They stay on the device until they are
logged. The norm of the whole gradient is the trainer's own metric.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from evenstep.events.event import StepBegin, UpdateBegin, UpdateEnd
from evenstep.events.hook import Hook
from evenstep.tensors import named_parameters


@final
class Statistics(Hook):
    """Logs train/lr/i, train/param_norm/i = ‖θ‖₂ and train/update_ratio/i = ‖θ_u − θ_{u−1}‖₂ / ‖θ_u‖₂ of group i.

    Also train/grad_norm/LAYER = ‖g‖₂ over the parameters of the module of that name, before clipping.

    Args:
        every_updates: values are logged at updates that are multiples of it.
        update_ratio: whether to compute the ratio, which needs a copy of the parameters during those updates.
        gradient_norms: whether to compute the norms of the layers' gradients.

    >>> hook = Statistics(every_updates=100, gradient_norms=True)
    """

    def __init__(self, *, every_updates: int = 100, update_ratio: bool = False, gradient_norms: bool = False) -> None:
        self._every = every_updates
        self._before: list[dict[str, Tensor]] = []
        # what is not computed is not heard, so that nothing is called for it in each update
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
        before, self._before = self._before, []
        if not event.committed or event.update % self._every:
            return
        put, update = self.trainer.storage.put, event.update
        for index, group in enumerate(self._groups()):
            norm = self._norm_of(group)
            if (rate := self.trainer.optimizer.param_groups[index].get("lr")) is not None:
                put(f"train/lr/{index}", rate, update=update)
            put(f"train/param_norm/{index}", norm, update=update)
            if before:
                change = self._norm_of({name: new - before[index][name] for name, new in group.items()})
                put(f"train/update_ratio/{index}", change, norm, update=update)

    def _groups(self) -> list[dict[str, Tensor]]:
        parameters = named_parameters(self.trainer.model)
        return [{name: parameters[name].detach() for name in names} for names in self.trainer.group_names]

    def _norm_of(self, values: Mapping[str, Tensor]) -> Tensor:
        return _norm(list(self.trainer.norms(values).values()))


def _norm(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
