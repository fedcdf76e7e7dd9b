"""Compares two runs: distances and digests of their states, and the first part of an update that differs."""

import hashlib
import math
import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEPTH = 5
_LARGE = 1 << 22  # elements of a tensor that is a dataset's rather than state
_NO_STATE = {*vars(nn.Module()), *vars(Optimizer([torch.zeros(1)], {})), "_trainer", "_now"}  # of torch, of the engine
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_APART = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference that rounding may make; else 1e-2
_SUMMED = ("the weight", "the loss")

Values: TypeAlias = Mapping[str, Tensor]
Parts: TypeAlias = dict[str, dict[int, tuple[Values, Values]]]
"""Tensors that each part of an update was given and gave, by the number of the micro-batch, in the order of parts."""


def difference(one: Values, other: Values, scale: float) -> tuple[float, str]:
    """Largest difference of tensors of the same names, as a share of `scale`, and the name of its tensor."""
    apart = {
        name: distance(value, other[name]) / scale if name in other else math.inf
        for name, value in one.items()
        if value.is_floating_point()
    }
    worst = max(apart, key=apart.__getitem__, default="")
    return (apart[worst], worst) if apart.get(worst) else (0.0, "")


def distance(one: Tensor, other: Tensor) -> float:
    """‖a - b‖₂ in float64; inf where shapes differ or a difference is NaN."""
    if one.shape != other.shape:
        return math.inf
    apart = one.double() - other.double()
    length = float(torch.where(one == other, torch.zeros_like(apart), apart).norm())
    return math.inf if math.isnan(length) else length


def norm(tensors: Values) -> float:
    """‖v‖₂ over all floating-point tensors."""
    return math.hypot(*(float(one.double().norm()) for one in tensors.values() if one.is_floating_point()))


def digest(value: Any) -> str:
    """sha256 of tensors, arrays and generators, and of trees with any order of names; else the value's repr."""
    if isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        content = repr((tensor.dtype, tensor.shape)).encode() + tensor.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, _GENERATORS):
        content = pickle.dumps(value)
    elif isinstance(value, Mapping | list | tuple | deque):
        content = repr(sorted((path, digest(inner)) for path, inner in _inner(value))).encode()
    else:
        return repr(value)
    return hashlib.sha256(content).hexdigest()


def states_of(owners: Mapping[str, object]) -> dict[str, str]:
    """Digest of each value in the attributes of objects and of what these hold, by its path; without parameters.

    Closures, globals and attributes of classes are not searched.
    """
    seen: set[int] = set()
    return dict(found for name, owner in owners.items() for found in _walk(name, owner, _DEPTH, seen))


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, bool | int | float | str):
        yield path, repr(value)
        return
    if id(value) in seen or not depth or isinstance(value, nn.Parameter):
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, np.ndarray, *_GENERATORS)):
        is_large = isinstance(value, Tensor | np.ndarray) and np.prod(value.shape) >= _LARGE
        yield path, "large" if is_large else digest(value)
        return
    is_ours = type(value).__module__.startswith("evenstep.")  # its own counters are saved or do not matter
    for name, inner in _inner(value):
        if not (is_ours and type(inner).__module__ in ("builtins", "collections", "torch")):
            yield from _walk(f"{path}{name}", inner, depth - (not isinstance(value, nn.Module)), seen)


def _inner(value: Any) -> list[tuple[str, Any]]:
    """Values in a container or in the attributes of an object, each with the end of its path."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in cast("Mapping[object, object]", value).items()]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", inner) for index, inner in enumerate(cast("list[object]", value))]
    attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    found = [(f".{name}", inner) for name, inner in attributes.items() if name not in _NO_STATE]
    if isinstance(value, nn.Module):
        found += [(f".{name}", one) for name, one in (*value.named_buffers(recurse=False), *value.named_children())]
    return found


def first_difference(one: Parts, other: Parts, *, exact: bool) -> str:
    """First part that was given the same and gave something else, by bits or up to rounding; "" if there is none."""
    for part, calls in one.items():
        others = other.get(part)
        if others is not None and _path_apart(part, calls, others, exact, side=0) is None:
            path = _path_apart(part, calls, others, exact, side=1)
            if path is not None:
                return f"{part} is the first that differs" + (f", at {path}" if path else "")
    return ""


def _path_apart(
    part: str, one: dict[int, tuple[Values, Values]], other: dict[int, tuple[Values, Values]], exact: bool, *, side: int
) -> str | None:
    """Path of the first tensors that differ among those that a part was given (side 0) or gave (1)."""
    mine, theirs = ([calls[number][side] for number in sorted(calls)] for calls in (one, other))
    scale = 0.0 if exact else math.hypot(*map(norm, mine))
    for path in mine[0]:
        if all(path in values for values in (*mine, *theirs)):
            here, there = [values[path] for values in mine], [values[path] for values in theirs]
            pairs = [(sum(here), sum(there))] if part.startswith(_SUMMED) else _by_samples(here, there)
            if any(_far(cast("Tensor", a), cast("Tensor", b), exact, scale) for a, b in pairs):
                return path
    return None


def _by_samples(one: list[Tensor], other: list[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Pairs of tensors of the same samples: of a micro-batch each, or one tensor's parts beside the micro-batches."""
    if len(one) == len(other):
        return zip(one, other, strict=True)
    whole = one[0]
    if len(one) == 1 and all(each.ndim == whole.ndim for each in other):
        for dim in range(min(2, whole.ndim)):
            counts = [each.shape[dim] for each in other]
            if sum(counts) == whole.shape[dim]:
                return zip(whole.split(counts, dim), other, strict=True)
    return ()


def _far(one: Tensor, other: Tensor, exact: bool, scale: float) -> bool:
    if exact:
        return one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if one.ndim != other.ndim:
        return True
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    begin = tuple(slice(size) for size in sizes)
    end = tuple(slice(-size, None) if size else slice(0) for size in sizes)  # padding may be on the left
    bound = _APART.get(one.dtype, 1e-2) * max(scale, 1e-30) if one.is_floating_point() else 0.0
    pairs = [(torch.nan_to_num(one[place]), torch.nan_to_num(other[place])) for place in (begin, end)]
    return all(distance(*pair) > bound for pair in pairs)
