"""Optimizer state in few bits, such as torchao's, as plain tensors in a dict, and back to the bit.

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
    tensors = {name: getattr(value, name) for name in names}
    narrow = {name: one for name, one in tensors.items() if one.is_floating_point() and one.itemsize == 1}
    return {
        "low_bit": type(value).__name__,
        # bytes in place of float8: torch can't pickle empty float8 tensors
        "tensors": {**tensors, **{name: one.view(torch.uint8) for name, one in narrow.items()}},
        "float8": {name: _word(one.dtype) for name, one in narrow.items()},
        "values": [_as_json(one) for one in values],
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
    for key, format in saved["float8"].items():
        tensors[key] = tensors[key].view(getattr(torch, format))
    return kind.__tensor_unflatten__(tensors, [_from_json(one) for one in saved["values"]], None, None)


def inner_tensors(value: Tensor) -> list[Tensor]:
    """The plain tensors of a tensor: itself, or the parts of a tensor of a known class."""
    return [*as_plain(value)["tensors"].values()] if is_low_bit(value) else [value]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": _word(value)}
    return {"shape": list(value)} if isinstance(value, torch.Size) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    entry = cast("dict[str, Any]", value)
    return torch.Size(entry["shape"]) if "shape" in entry else getattr(torch, str(entry["dtype"]))
