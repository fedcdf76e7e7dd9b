"""Distances of tensors, sha256 of states, and digests of what a run's objects hold."""

import hashlib
import math
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEPTH = 5
_LARGE = 1 << 22  # elements of a tensor that is a dataset's rather than state
_OF_TORCH = {*vars(nn.Module()), *vars(Optimizer([torch.zeros(1)], {}))}
_OF_ENGINE = {"_trainer", "_now"}  # set by the engine in hooks and tasks
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)


class Difference(NamedTuple):
    """Largest difference of two runs, and the name of its tensor."""

    value: float
    of: str


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], scale: float) -> Difference:
    """Largest difference of tensors of the same names, as a share of `scale`."""
    worst = Difference(0.0, "")
    for name, value in one.items():
        if not value.is_floating_point():
            continue
        apart = distance(value, other[name]) / scale if name in other else math.inf
        if not apart <= worst.value:  # also if it is NaN
            worst = Difference(math.inf if math.isnan(apart) else apart, name)
    return worst


def distance(one: Tensor, other: Tensor) -> float:
    """‖a - b‖₂ in float64; inf where their shapes differ."""
    if one.shape != other.shape:
        return math.inf
    apart = one.double() - other.double()
    return float(torch.where(one == other, torch.zeros_like(apart), apart).norm())


def norm(tensors: Mapping[str, Tensor]) -> float:
    """‖v‖₂ over all of them."""
    return math.hypot(*(float(one.double().norm()) for one in tensors.values() if one.is_floating_point()))


def sha256_of(tree: object) -> str:
    """sha256 over all tensors and numbers of a state, by name and in any order of names."""
    total = hashlib.sha256()
    _add(total, tree)
    return total.hexdigest()


def _add(total: Any, node: object) -> None:
    if isinstance(node, Tensor):
        total.update(f"{node.dtype}{tuple(node.shape)}".encode())
        total.update(node.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(node, np.ndarray):
        total.update(node.tobytes())
    elif isinstance(node, dict):
        for name, value in sorted(cast("dict[object, object]", node).items(), key=lambda item: str(item[0])):
            total.update(str(name).encode())
            _add(total, value)
    elif isinstance(node, list | tuple | deque):
        for value in cast("list[object]", node):
            _add(total, value)
    else:
        total.update(repr(node).encode())


def states_of(owners: Mapping[str, object]) -> dict[str, str]:
    """Digest of each value in the attributes of objects and of what these hold, by its path; without parameters.

    Closures, globals and attributes of classes are not searched.
    """
    seen: set[int] = set()
    return dict(found for name, owner in owners.items() for found in _walk(name, owner, _DEPTH, seen))


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, bool | int | float | str):
        yield path, repr(value)
    elif id(value) in seen or not depth or isinstance(value, nn.Parameter):
        return
    elif isinstance(value, Tensor | np.ndarray):
        seen.add(id(value))
        yield path, sha256_of(value if np.prod(value.shape) < _LARGE else tuple(value.shape))
    elif isinstance(value, _GENERATORS):
        seen.add(id(value))
        yield path, hashlib.sha256(pickle.dumps(value)).hexdigest()
    else:
        seen.add(id(value))
        for name, inner in _held(value):
            yield from _walk(f"{path}{name}", inner, depth - (not isinstance(value, nn.Module)), seen)


def _held(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in cast("Mapping[object, object]", value).items()]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", inner) for index, inner in enumerate(cast("list[object]", value))]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    attributes = {name: inner for name, inner in vars(value).items() if name not in _OF_TORCH | _OF_ENGINE}
    if isinstance(value, nn.Module):
        attributes |= {**dict(value.named_buffers(recurse=False)), **dict(value.named_children())}
    if type(value).__module__.startswith("evenstep."):  # its own counters are saved or do not matter
        plain = ("builtins", "collections", "torch")
        attributes = {name: inner for name, inner in attributes.items() if type(inner).__module__ not in plain}
    return [(f".{name}", inner) for name, inner in attributes.items()]
