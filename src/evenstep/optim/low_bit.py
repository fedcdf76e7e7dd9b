"""Torchao's optimizer state in few bits as plain tensors in a dict, and back to the bit.

Only classes in the table below are made from a file.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.errors import CheckpointError
from evenstep.lazy import load_optional

CLASSES: Mapping[str, str] = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""Known classes of tensors, each with its module."""


def is_low_bit(value: object) -> bool:
    """True for a tensor of a known class."""
    kind = type(value)
    return CLASSES.get(kind.__name__) == kind.__module__


def as_plain(value: Any) -> Any:
    """A tensor of a known class as a dict of plain tensors; other values unchanged."""
    if not is_low_bit(value):
        return value
    names, values = value.__tensor_flatten__()
    return {
        "low_bit": type(value).__name__,
        "tensors": {name: _as_bytes(getattr(value, name)) for name in names},
        "values": [list(one) if isinstance(one, torch.Size) else _word(one) for one in values],
    }


def from_plain(value: Any, device: torch.device) -> Any:
    """Inverse of `as_plain`, on `device`, in new memory."""
    if not isinstance(value, dict) or "low_bit" not in value:
        return value
    saved = cast("dict[str, Any]", value)
    name = str(saved["low_bit"])
    if name not in CLASSES:
        raise CheckpointError(
            f"the checkpoint's optimizer state holds a tensor of class {name!r}, but known are {', '.join(CLASSES)}; "
            f"resume with the version of evenstep that saved it."
        )
    kind: Any = getattr(load_optional(CLASSES[name], "quantization"), name)
    tensors = {key: one.to(device, copy=True) for key, one in saved["tensors"].items()}
    if name == "OptimStateFp8":
        tensors["codes"] = tensors["codes"].view(torch.float8_e4m3fn)
    values = [torch.Size(cast("list[int]", one)) if isinstance(one, list) else _named(one) for one in saved["values"]]
    return kind.__tensor_unflatten__(tensors, values, None, None)


def inner_tensors(value: Tensor) -> list[Tensor]:
    """The plain tensors of a tensor: itself, or the parts of a tensor of a known class."""
    return [*as_plain(value)["tensors"].values()] if is_low_bit(value) else [value]


def _as_bytes(tensor: Tensor) -> Tensor:
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1  # torch can't pickle empty ones
    return tensor.view(torch.uint8) if is_float8 else tensor


def _word(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _named(value: Any) -> Any:
    return getattr(torch, value) if isinstance(value, str) else value
