"""What differs between two checkpoints, in lines: tensors by how much, other values by what they are.

Tensors are read one at a time, so two large checkpoints need little memory.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.arguments import format_name, shortened
from evenstep.checkpoint import CheckpointReader


def differences(one: CheckpointReader, other: CheckpointReader) -> Iterator[str]:
    """A line for each tensor and each other value that is not the same in both."""
    kinds = {id(reader): _kept_as_bytes(reader.values, "") for reader in (one, other)}
    for name in dict.fromkeys((*one.tensors, *other.tensors)):
        if name not in one.tensors or name not in other.tensors:
            yield f"{name}: only in {'a' if name in one.tensors else 'b'}"
            continue
        a, b = (_of_kind(reader.tensor(name), kinds[id(reader)].get(name)) for reader in (one, other))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {_kind(a)} in a, {_kind(b)} in b"
        elif line := _distance(a, b):
            yield f"{name}: {line}"
    for path, a, b in _values(one.values, other.values, ""):
        yield f"{path}: {shortened(str(a))} in a, {shortened(str(b))} in b"


def _kept_as_bytes(values: Any, part: str) -> dict[str, str]:
    if isinstance(values, list):
        inner: list[tuple[str, Any]] = [(part, value) for value in cast("list[Any]", values)]
    elif isinstance(values, dict):
        known = cast("dict[str, Any]", values)
        if known.keys() == {"$tensor", "dtype"}:
            return {f"{part}/{known['$tensor']}": known["dtype"]}
        inner = [(part or key, value) for key, value in known.items()]
    else:
        return {}
    return {name: kind for where, value in inner for name, kind in _kept_as_bytes(value, where).items()}


def _of_kind(tensor: Tensor, kind: str | None) -> Tensor:
    dtype: torch.dtype | None = getattr(torch, kind or "", None)  # None too for one that only a newer torch has
    return tensor if dtype is None else tensor.reshape(-1).view(dtype).reshape(tensor.shape[:-1])


def _distance(a: Tensor, b: Tensor) -> str:
    """How far apart two tensors of a kind are; nothing if they are the same bits.

    >>> _distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    '1 of 2 elements differ, by at most 0.5; |a - b| / |a| = 0.22'
    """
    if not a.numel() or torch.equal(_bits(a), _bits(b)):
        return ""
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
    unequal = _bits(a).reshape(a.numel(), -1).ne(_bits(b).reshape(a.numel(), -1)).any(1)
    gap = (x - y).abs()
    relative = gap.norm() / x.norm() if x.norm() > 0 else torch.inf
    return (
        f"{int(unequal.sum()):,} of {a.numel():,} elements differ, by at most {gap.max():.4g}; "
        f"|a - b| / |a| = {float(relative):.2g}"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {format_name(tensor.dtype)}"


def _values(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        one, other = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        for key in dict.fromkeys((*one, *other)):
            yield from _values(one.get(key), other.get(key), f"{path}/{key}" if path else key)
    elif a != b:
        yield path, a, b
