"""What a precision whose model is of 16 bits means for the other parts of a run: decided once, when it is built.

Who steps in which format, how a strategy gathers, and what can't be together. What the formats are is `precision`'s.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import is_orthogonal, local_tensor
from evenstep.names import named_parameters, parameters_in
from evenstep.optim.modes import has_modes
from evenstep.optim.multi import inner
from evenstep.optim.stepping import MasterSteps, RoundedSteps, Steps
from evenstep.optim.stepping.stepping import is_narrow
from evenstep.parallel import ParameterLayout, Strategy
from evenstep.parallel.shardable import cuttable
from evenstep.pipeline import PipelineModel
from evenstep.precision import Precision
from evenstep.precision.sixteen_bits import stays_float32


def check_formats(precision: Precision, *, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise ArgumentError for what can't be together with a model of 16 bits; nothing is changed."""
    if precision.format is None:
        if strategy.layout.divides == "elements":
            _check_narrow_shards(optimizer, exact=strategy.layout.exact)
        return
    mixed = "bf16-mixed" if precision.format is torch.bfloat16 else "16-mixed"
    _check_orthogonal(precision, model, mixed)
    for one in inner(optimizer):
        if has_modes(one):
            raise ArgumentError(
                f"{type(one).__name__} evaluates other parameters than it trains (it has `train` and `eval`), which it "
                f"computes from those of the model, but with precision '{precision.name}' it steps float32 stand-ins "
                f"of those; use precision '{mixed}', or another optimizer."
            )
    strategy.gathering(precision.format)  # may be refused
    if strategy.layout.divides != "elements":
        return
    for name, module in model.named_modules():
        if stays_float32(module) and any(map(cuttable, module.parameters(recurse=False))):
            raise ArgumentError(
                f"with precision '{precision.name}' the parameters of `{name}`, a {type(module).__name__}, stay "
                f"float32 beside its statistics, but `fsdp` gathers all parameters in one format; use `ddp` or "
                f"`zero1`, a layer without running statistics, or precision '{mixed}'."
            )


def _check_narrow_shards(optimizer: Optimizer, *, exact: bool) -> None:
    """Raise ArgumentError for 16-bit parameters that are stepped as they are and can't be so in shards.

    Args:
        exact: whether shards must have the bits of the whole.
    """
    if not any(one.requires_grad and is_narrow(one) for one in parameters_in(optimizer)):
        return
    summed = "with `fsdp` gradients of 16-bit parameters are summed in float32"
    instead = "use `zero1`, or precision 'bf16-true', with which shards are float32"
    if exact:
        raise ArgumentError(
            f"{summed}, elsewhere in 16 bits, so `ordered` sums would not have the bits of one process; {instead}."
        )


def _check_orthogonal(precision: Precision, model: nn.Module, mixed: str) -> None:
    """Raise ArgumentError for trained orthogonal parameters in 16 bits, of which torch makes no finite gradient."""
    for name, module in model.named_modules():
        if (
            isinstance(module, ParametrizationList)
            and any(map(is_orthogonal, module))
            and any(one.requires_grad for one in module.parameters())
            and not stays_float32(module)
        ):
            raise ArgumentError(
                f"`{name}` of the model is made orthogonal, of which torch has no finite gradient in 16 bits, and with "
                f"precision '{precision.name}' it would be computed in them; use precision '{mixed}'."
            )


def build_steps(
    precision: Precision,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    rounded: Sequence[str],
    layout: ParameterLayout,
    seed: int,
) -> Steps:
    """How the optimizer steps a model of this precision.

    Args:
        model: as ranks hold it.
        optimizer: of the parameters that this rank steps.
        rounded: the names of the parameters that the optimizers of all ranks hold and the model has in 16 bits.
    """
    if precision.format is None:
        return Steps()
    named = named_parameters(model)
    if precision.keeps_masters:  # what is in shards is rounded when it is gathered
        own = {name: named[name] for name in rounded if local_tensor(named[name]) is named[name]}
        return MasterSteps(optimizer, own, precision.format)
    aliases = model.aliases if isinstance(model, PipelineModel) else {}
    names = {id(parameter): aliases.get(name, name) for name, parameter in named.items()}
    return RoundedSteps(optimizer, names, seed=seed, first_element=layout.first_element)


def averaged_as(precision: Precision, model: nn.Module, rounded: Sequence[str]) -> dict[str, torch.dtype]:
    """The formats, by name, of parameters that ranks hold in more bits than the model computes with.

    An average follows what the model computes with, so that it is the same with every strategy.
    """
    if precision.format is None:
        return {}
    named = named_parameters(model)
    return {name: precision.format for name in rounded if named[name].dtype != precision.format}
