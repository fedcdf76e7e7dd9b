"""What a run keeps in memory for its parameters, per parameter: what the number formats and the optimizer cost.

Counted is what lies there from update to update on this rank, and the gradients at their sum. Activations are not, nor
what reductions hold for a while: buckets (as much as the gradients with `ddp`), partial sums of ordered reductions
(log₂ n + 1 times the gradients of n micro-batches), parameters that are gathered, and float32 stand-ins of a step
without masters (64 MiB, or one parameter).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from torch import Tensor

from evenstep.internals import local_tensor
from evenstep.names import named_parameters
from evenstep.optim.low_bit import inner_tensors
from evenstep.optim.multi import inner
from evenstep.parallel import mapped
from evenstep.strides import gradient_format
from evenstep.train.state.train_state import TrainState


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on this rank.

    Args:
        model: of the parameters as the model has them.
        masters: of the float32 weights that the optimizer steps, where the model has others.
        gradients: of what is trained, at its sum.
        optimizer: of its state; nothing before the first step.
        average: of the parameters' average.
    """

    model: int
    masters: int
    gradients: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.model + self.masters + self.gradients + self.optimizer + self.average

    def described(self, parameters: int) -> str:
        """The bytes per parameter, in a sentence.

        Args:
            parameters: how many numbers all ranks' parameters hold together.

        >>> Footprint(model=8, masters=16, gradients=16, optimizer=32, average=0).described(4)
        '18 bytes per parameter: model 2, masters 4, gradients 4, optimizer 8'
        """
        parts = {field.name: getattr(self, field.name) / max(parameters, 1) for field in fields(self)}
        each = ", ".join(f"{name} {value:.3g}" for name, value in parts.items() if value)
        return f"{sum(parts.values()):.3g} bytes per parameter: {each}"


def footprint(state: TrainState) -> Footprint:
    """What lies on this rank of a run's state. Shards in float32 that the model gathers in 16 bits are masters."""
    parameters, formats = named_parameters(state.model), state.averaged_as
    return Footprint(
        model=_bytes(one for name, one in parameters.items() if name not in formats),
        masters=_bytes([*state.steps.masters.values(), *(parameters[name] for name in formats)]),
        gradients=sum(
            local_tensor(one).numel() * gradient_format(one).itemsize
            for one in parameters.values()
            if one.requires_grad
        ),
        optimizer=_bytes(_tensors(one.state for one in inner(state.optimizer))),
        average=0 if state.ema is None else _bytes(state.ema.state_dict()[name] for name in parameters),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local.numel() * local.itemsize for local in map(local_tensor, tensors))


def _tensors(states: Iterable[Mapping[Any, Any]]) -> list[Tensor]:
    """The tensors of optimizers' states; counts of steps are no part of what a parameter costs."""
    found: list[Tensor] = []
    for state in states:
        for of_parameter in state.values():
            mapped(dict(of_parameter), lambda one: found.extend(inner_tensors(one)) if one.ndim else None)
    return found
