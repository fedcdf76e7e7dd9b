"""Effects of 16-bit models on the optimizer, the strategy and the average of a run.

Who steps in which format, and how a strategy gathers. What the formats are is `precision`'s.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor
from evenstep.optim.masters import MasterStepper
from evenstep.optim.modes import moded
from evenstep.optim.rounded import RoundedStepper
from evenstep.optim.stepper import Stepper, is_narrow
from evenstep.parallel import ParameterLayout, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.precision import Precision
from evenstep.tensors import named_parameters, parameters_in


def check_formats(precision: Precision, *, optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise ArgumentError for an optimizer or a strategy that can't be exact with parameters of 16 bits."""
    if precision.format is not None:
        strategy.gathering(precision.format)  # may be refused
        for one in moded(optimizer):
            raise ArgumentError(
                f"{type(one).__name__} evaluates other parameters than it trains, which precision '{precision.name}' "
                f"does not hold: use a mixed precision, or another optimizer.",
                field="precision",
            )
        return
    is_exact_in_shards = strategy.layout.divides == "elements" and strategy.layout.exact
    if is_exact_in_shards and any(one.requires_grad and is_narrow(one) for one in parameters_in(optimizer)):
        raise ArgumentError(
            "`fsdp` sums gradients of 16-bit parameters in float32, so `ordered` sums would not have the bits of "
            "one process: use `zero1`, or precision 'bf16-true'.",
            field="strategy",
        )


def build_stepper(
    precision: Precision,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    rounded: Sequence[str],
    layout: ParameterLayout,
    seed: int,
) -> Stepper:
    """How the optimizer steps a model of this precision.

    Args:
        model: as ranks hold it.
        optimizer: of the parameters that this rank steps.
        rounded: the names of the parameters that the optimizers of all ranks hold and the model has in 16 bits.
    """
    if precision.format is None:
        return Stepper(optimizer)
    named = named_parameters(model)
    if precision.keeps_masters:  # what is in shards is rounded when it is gathered
        own = {name: named[name] for name in rounded if local_tensor(named[name]) is named[name]}
        return MasterStepper(optimizer, own, precision.format)
    aliases = model.aliases if isinstance(model, PipelineModel) else {}
    names = {id(parameter): aliases.get(name, name) for name, parameter in named.items()}
    return RoundedStepper(optimizer, names, seed=seed, first_element=layout.first_element)


def averaged_as(precision: Precision, model: nn.Module, rounded: Sequence[str]) -> dict[str, torch.dtype]:
    """The formats, by name, of parameters that ranks hold in more bits than the model computes with.

    An average follows what the model computes with, so that it is the same with every strategy.
    """
    if precision.format is None:
        return {}
    named = named_parameters(model)
    return {name: precision.format for name in rounded if named[name].dtype != precision.format}
