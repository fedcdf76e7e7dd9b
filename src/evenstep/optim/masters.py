"""Master weights: the optimizer steps float32 weights that are kept, and the model holds their rounded values.

    θ ← Optimizer(θ, g, …) in float32,   p ← round(θ)

Checkpoints hold θ under the model's names. Elements of p that a hook writes between two updates are copied to θ;
writes through `parameter.data` are not noticed.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.internals import foreach_copy, times_written
from evenstep.optim.stepper import Stepper


@final
class MasterStepper(Stepper):
    """Steps master weights.

    Args:
        parameters: float32 parameters by name; cast here, in place.
        format: number format of the rounded parameters.

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> stepper = MasterStepper(torch.optim.SGD([weight], lr=1.0), {"weight": weight}, torch.bfloat16)
    >>> weight.grad = torch.tensor([-0.001])
    >>> for update in (1, 2): stepper.step(update)
    >>> weight.item(), round(stepper.masters["weight"].item(), 6)
    (1.0, 1.002)
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], format: torch.dtype) -> None:
        super().__init__(optimizer)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = [one for one in self.parameters if id(one) in names]
        self._widen_state()
        self._masters = [nn.Parameter(one.detach().clone(), requires_grad=False) for one in self._parameters]
        self._pairs = list(zip(self._parameters, self._masters, strict=True))
        self.masters = {names[id(one)]: master for one, master in self._pairs}
        self.rounded = frozenset(parameters)
        for parameter in parameters.values():
            parameter.data = parameter.data.to(format)
            parameter.grad_dtype = torch.float32
        self._written = self._marks()

    @torch.no_grad()
    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(values[name])
        self._written = self._marks()

    def _step(self, update: int) -> None:
        if self._marks() != self._written:
            self._follow_writes()
        for parameter, master in self._pairs:
            master.grad = parameter.grad
        try:
            self._step_stand_ins(self._pairs)
        finally:
            for master in self._masters:
                master.grad = None
        with torch.no_grad():
            foreach_copy(self._parameters, self._masters)
        self._written = self._marks()

    def _marks(self) -> list[int]:
        return [*map(times_written, self._parameters), *map(Tensor.data_ptr, self._parameters)]

    @torch.no_grad()
    def _follow_writes(self) -> None:
        for parameter, master in self._pairs:
            same = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(same, master, parameter.to(master.dtype)))
