"""Table of the optimizers that ranks may share: by elements (`fsdp`), by whole parameters (`zero1`, stages), or not.

A part of a model is stepped exactly only if the optimizer's result for it depends on nothing else. Torch's own classes
are each tested to the bit; other classes say it themselves.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import cast

import torch
from torch.optim import Optimizer

from evenstep.internals import has_state_hooks
from evenstep.optim.multi import inner


class Granularity(IntEnum):
    """The smallest part of a model that an optimizer steps exactly."""

    ELEMENT = 0
    PARAMETER = 1
    MODEL = 2


TORCH: Mapping[type[Optimizer], Granularity] = MappingProxyType(
    {
        torch.optim.Adadelta: Granularity.ELEMENT,
        torch.optim.Adagrad: Granularity.ELEMENT,
        torch.optim.Adam: Granularity.ELEMENT,
        torch.optim.AdamW: Granularity.ELEMENT,
        torch.optim.Adamax: Granularity.ELEMENT,
        torch.optim.ASGD: Granularity.ELEMENT,
        torch.optim.NAdam: Granularity.ELEMENT,
        torch.optim.RAdam: Granularity.ELEMENT,
        torch.optim.RMSprop: Granularity.ELEMENT,
        torch.optim.SGD: Granularity.ELEMENT,
        torch.optim.Rprop: Granularity.PARAMETER,  # torch has no kernels for shards
        torch.optim.Adafactor: Granularity.PARAMETER,  # takes means over rows and columns
        torch.optim.Muon: Granularity.PARAMETER,  # orthogonalises whole matrices
        torch.optim.SparseAdam: Granularity.PARAMETER,  # torch has no kernels for shards
        torch.optim.LBFGS: Granularity.MODEL,  # searches along one line for all parameters
    }
)
"""Torch's classes, without their subclasses."""

NO_FUSED_SHARDS = (torch.optim.Adagrad, torch.optim.SGD)
"""Classes whose fused kernels take no shards."""

TORCHAO = tuple(
    f"torchao.optim.adam.{name}" for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
)
"""Torchao's classes by name. Their state is in blocks of elements, which shards would cut elsewhere."""


def granularity(optimizer: Optimizer) -> Granularity | None:
    """Granularity of an optimizer, from the tables or from the optimizer itself; None if unknown.

    A class says `elementwise = True` or `parameterwise = True` in its own body, since subclasses may differ. It may
    also be said of the object.

    >>> granularity(torch.optim.Muon([torch.zeros(2, 2, requires_grad=True)])).name
    'PARAMETER'
    """
    kind = type(optimizer)
    if kind in TORCH:
        return TORCH[kind]
    if f"{kind.__module__}.{kind.__qualname__}" in TORCHAO:
        return Granularity.PARAMETER
    own = {**vars(kind), **vars(optimizer)}
    if own.get("elementwise") is True:
        return Granularity.ELEMENT
    return Granularity.PARAMETER if own.get("parameterwise") is True else None


def tells_itself(optimizer: Optimizer) -> bool:
    """True if the optimizer has its own `state_dict`, or hooks on it."""
    return has_state_hooks(optimizer) or type(optimizer).state_dict is not Optimizer.state_dict


def why_not_by(part: Granularity, optimizer: Optimizer) -> str:
    """Reason why ranks can't share the parts that an optimizer steps; "" if they can.

    >>> optimizer = torch.optim.Adam([torch.zeros(2, 2, requires_grad=True)])
    >>> why_not_by(Granularity.ELEMENT, optimizer)
    ''
    """
    for one in inner(optimizer):
        name = type(one).__name__
        steps = granularity(one)
        if steps is None:
            word = part.name.lower()
            return f"{name} is unknown: if it steps each {word} by itself, say `{word}wise = True` in its class"
        if steps > part:
            return f"{name} is not exact on such parts"
        groups = cast("list[dict[str, object]]", one.param_groups)
        if part is Granularity.ELEMENT and type(one) in NO_FUSED_SHARDS and any(group.get("fused") for group in groups):
            return f"torch has no fused {name} for shards; build it with `foreach=True`"
    return ""
