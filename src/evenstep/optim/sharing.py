"""Table of the optimizers that ranks may share: by elements (`fsdp`), by whole parameters (`zero1`, stages), or not.

A part of a model is stepped exactly only if the optimizer's result for it depends on nothing else. Torch's own classes
are each tested to the bit; other classes declare it.
"""

from collections.abc import Mapping
from enum import IntEnum

from torch import optim
from torch.optim import Optimizer

from evenstep.optim.optimizers import parts_of


class Granularity(IntEnum):
    """The smallest part of a model that an optimizer steps exactly."""

    ELEMENT = 0
    PARAMETER = 1
    MODEL = 2


_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
)

TORCH: Mapping[type[Optimizer], Granularity] = {
    **dict.fromkeys(_ELEMENTWISE, Granularity.ELEMENT),
    optim.Rprop: Granularity.PARAMETER,  # torch has no kernels for shards
    optim.Adafactor: Granularity.PARAMETER,  # takes means over rows and columns
    optim.Muon: Granularity.PARAMETER,  # orthogonalises whole matrices
    optim.SparseAdam: Granularity.PARAMETER,  # torch has no kernels for shards
    optim.LBFGS: Granularity.MODEL,  # searches along one line for all parameters
}
"""Torch's classes, without their subclasses."""

NO_FUSED_SHARDS = (optim.Adagrad, optim.SGD)
"""Classes whose fused kernels take no shards."""

TORCHAO = tuple(
    f"torchao.optim.adam.{name}" for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
)
"""Torchao's classes by name. Their state is in blocks of elements, which shards would cut elsewhere."""


def granularity(optimizer: Optimizer) -> Granularity | None:
    """Granularity of an optimizer, from the tables or from the optimizer itself; None if unknown.

    A class declares `elementwise = True` or `parameterwise = True` in its own body, since subclasses may differ. The
    attribute may also be one of the object.
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


def shard_refusal(part: Granularity, optimizer: Optimizer) -> str:
    """Reason why ranks can't share the parts that an optimizer steps; "" if they can."""
    for one in parts_of(optimizer):
        name = type(one).__name__
        steps = granularity(one)
        if steps is None:
            word = part.name.lower()
            return f"{name} is unknown: if it steps each {word} by itself, say `{word}wise = True` in its class"
        if steps > part:
            return f"{name} is not exact on such parts"
        is_fused = any(group.get("fused") for group in one.param_groups)
        if part is Granularity.ELEMENT and type(one) in NO_FUSED_SHARDS and is_fused:
            return f"torch has no fused {name} for shards; build it with `foreach=True`"
    return ""
