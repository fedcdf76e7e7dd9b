"""Which optimizers ranks may share between them: by elements, by whole parameters, or not at all.

`fsdp` gives each rank a part of every parameter, which is exact only if the new value of an element depends on that
element alone; `zero1` and stages give each rank some of the parameters, which is exact only if those depend on nothing
of the others. Neither can be read off an optimizer, so here stand torch's own classes, each tested to the bit
(tests/usage/test_optimizers.py), and torchao's, and all others must say it themselves. It looks at no number and takes
no step.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch.optim import Optimizer

from evenstep.internals import has_state_hooks
from evenstep.optim.multi import inner


class Granularity(IntEnum):
    """The smallest part of a model that an optimizer steps by itself, with the same result."""

    ELEMENT = 0
    PARAMETER = 1
    MODEL = 2


class Known(NamedTuple):
    """What is known of an optimizer.

    Args:
        steps: the smallest part that it steps by itself.
        why: what it does that smaller parts would break; "" where nothing.
        unless: options under which torch can't step shards though `steps` is an element, and why.
    """

    steps: Granularity
    why: str = ""
    unless: Mapping[str, str] = MappingProxyType({})


_ELEMENTWISE = Known(steps=Granularity.ELEMENT)


def _no_fused(name: str) -> Known:
    why = f"torch has no fused kernel of {name} for shards; build it with `foreach=True` instead of `fused=True`"
    return Known(steps=Granularity.ELEMENT, unless={"fused": why})


TORCH: Mapping[type[Optimizer], Known] = MappingProxyType(
    {
        torch.optim.Adadelta: _ELEMENTWISE,
        torch.optim.Adagrad: _no_fused("Adagrad"),
        torch.optim.Adam: _ELEMENTWISE,
        torch.optim.AdamW: _ELEMENTWISE,
        torch.optim.Adamax: _ELEMENTWISE,
        torch.optim.ASGD: _ELEMENTWISE,
        torch.optim.NAdam: _ELEMENTWISE,
        torch.optim.RAdam: _ELEMENTWISE,
        torch.optim.RMSprop: _ELEMENTWISE,
        torch.optim.SGD: _no_fused("SGD"),
        torch.optim.Rprop: Known(steps=Granularity.PARAMETER, why="torch has no kernels of it for shards"),
        torch.optim.Adafactor: Known(
            steps=Granularity.PARAMETER, why="it takes means over the rows and columns of a matrix"
        ),
        torch.optim.Muon: Known(steps=Granularity.PARAMETER, why="it makes the whole matrix of an update orthogonal"),
        torch.optim.SparseAdam: Known(steps=Granularity.PARAMETER, why="torch has no kernels of it for shards"),
        torch.optim.LBFGS: Known(steps=Granularity.MODEL, why="it searches along a line for all parameters at once"),
    }
)
"""Torch's classes. Only these very classes: what a subclass adds is not known."""

_IN_BLOCKS = Known(
    steps=Granularity.PARAMETER,
    why="it keeps its state in blocks of elements with a scale for each, which shards would cut elsewhere",
)
TORCHAO = tuple(
    f"torchao.optim.adam.{name}" for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
)
"""Torchao's classes, by name, since torchao is not loaded for those who do without."""


def is_of_torchao(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is of one of torchao's classes that are known."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" in TORCHAO


def known(optimizer: Optimizer) -> Known | None:
    """What is known of `optimizer`, from the tables or since it says so; None where nothing is.

    A class says `elementwise = True` or `parameterwise = True` in its own body, since what holds for it need not hold
    for its subclasses; of a class that is not yours, say it of the object.

    >>> optimizer = torch.optim.Muon([torch.zeros(2, 2, requires_grad=True)])
    >>> known(optimizer).steps.name
    'PARAMETER'
    """
    kind = type(optimizer)
    if kind in TORCH:
        return TORCH[kind]
    if is_of_torchao(optimizer):
        return _IN_BLOCKS
    said = {**vars(kind), **vars(optimizer)}
    if said.get("elementwise") is True:
        return _ELEMENTWISE
    return Known(steps=Granularity.PARAMETER) if said.get("parameterwise") is True else None


def tells_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a `state_dict` of its own, or hooks on it."""
    return has_state_hooks(optimizer) or type(optimizer).state_dict is not Optimizer.state_dict


def why_not_by(part: Granularity, optimizer: Optimizer) -> str:
    """Why ranks can't share what `optimizer` steps by such parts; "" where they can.

    >>> optimizer = torch.optim.Adam([torch.zeros(2, 2, requires_grad=True)])
    >>> why_not_by(Granularity.ELEMENT, optimizer)
    ''
    """
    for one in inner(optimizer):
        name, what = type(one).__name__, known(one)
        if what is None:
            said = "elementwise" if part is Granularity.ELEMENT else "parameterwise"
            alone = "element" if part is Granularity.ELEMENT else "parameter"
            return (
                f"nothing is known of {name}: if it steps each {alone} by that {alone}'s own gradient and state alone, "
                f"say `{said} = True` in its class"
            )
        if what.steps > part:
            return f"{name} is not exact on such parts: {what.why or 'it says that it steps whole parameters only'}"
        if part is Granularity.ELEMENT:
            options = cast("list[dict[str, object]]", one.param_groups)
            faults = [why for option, why in what.unless.items() if any(group.get(option) for group in options)]
            if faults:
                return faults[0]
    return ""
