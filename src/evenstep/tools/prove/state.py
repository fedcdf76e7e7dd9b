"""Distances of tensors, sha256 of states, and digests of values that a run's objects hold."""

import hashlib
import math
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEPTH = 5
_LARGE = 1 << 22  # elements of a tensor that is a dataset's rather than state
_NO_STATE = {*vars(nn.Module()), *vars(Optimizer([torch.zeros(1)], {})), "_trainer", "_now"}  # of torch, of the engine
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)

Values = Mapping[str, Tensor]


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
        return
    if id(value) in seen or not depth or isinstance(value, nn.Parameter):
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        yield path, sha256_of(value if np.prod(value.shape) < _LARGE else tuple(value.shape))
    elif isinstance(value, _GENERATORS):
        yield path, hashlib.sha256(pickle.dumps(value)).hexdigest()
    else:
        is_ours = type(value).__module__.startswith("evenstep.")  # its own counters are saved or do not matter
        for name, inner in parts_of(value):
            if not (is_ours and type(inner).__module__ in ("builtins", "collections", "torch")):
                yield from _walk(f"{path}{name}", inner, depth - (not isinstance(value, nn.Module)), seen)


def parts_of(value: Any) -> list[tuple[str, Any]]:
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
