"""Optimizer state in few bits, such as torchao's, as plain tensors in a dict, and back to the bit.

Such state is a tensor of a class of its own, made of plain tensors (codes of 8 or 4 bits, a scale for each block of
elements) and of a few values. A state that is saved holds those, under names that a file has a format for; what is read
becomes a tensor of a class in the table below and of no other, so nothing in a file says what code is run. It quantises
nothing. (State in 8 bits: Dettmers et al., 2021, https://arxiv.org/abs/2110.02861.)
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.errors import CheckpointError, clause
from evenstep.plugins import load_optional

_KIND, _TENSORS, _VALUES = "low_bit", "tensors", "values"

CLASSES: Mapping[str, str] = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""The classes of tensors that are known, each with the module that has it."""


def is_low_bit(value: object) -> bool:
    """Whether a value is a tensor of a known class.

    >>> is_low_bit(torch.zeros(2))
    False
    """
    kind = type(value)
    return CLASSES.get(kind.__name__) == kind.__module__


def as_plain(value: Any) -> Any:
    """A value of an optimizer's state as a checkpoint takes it: what is no tensor of a known class stays as it is."""
    if not is_low_bit(value):
        return value
    names, values = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names}
    return {_KIND: type(value).__name__, _TENSORS: tensors, _VALUES: [_plain(one) for one in values]}


def from_plain(value: Any, device: torch.device) -> Any:
    """What `as_plain` was given, on `device`, in memory of its own.

    Raises:
        CheckpointError: a class that is not known, or values that it can't be made of.
    """
    if not isinstance(value, dict) or _KIND not in value:
        return value
    saved = cast("dict[str, Any]", value)
    name = str(saved[_KIND])
    if name not in CLASSES:
        raise CheckpointError(
            f"the checkpoint's optimizer state holds a tensor of class {name!r}, but known are {', '.join(CLASSES)}; "
            f"resume with the version of evenstep that saved it."
        )
    kind: Any = getattr(load_optional(CLASSES[name], "quantization"), name)
    tensors = {key: one.to(device, copy=True) for key, one in saved[_TENSORS].items()}
    try:
        return kind.__tensor_unflatten__(tensors, [_value(one) for one in saved[_VALUES]], None, None)
    except (TypeError, KeyError, AssertionError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's optimizer state of class {name} can't be put together again: {clause(error)}; "
            f"resume with the version of torchao that saved it."
        ) from error


def inner_tensors(value: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, or those of one of a known class."""
    return [*as_plain(value)[_TENSORS].values()] if is_low_bit(value) else [value]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"shape": list(value)} if isinstance(value, torch.Size) else value


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    told = cast("dict[str, Any]", plain)
    return torch.Size(told["shape"]) if "shape" in told else getattr(torch, str(told["dtype"]))
