"""sha256 of trees of tensors and numbers, and digests of the state that a run's objects hold."""

import hashlib
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
_OF_TORCH = {*vars(nn.Module()), *vars(Optimizer([torch.zeros(1)], {}))}
_OF_ENGINE = {"_trainer", "_now"}  # set by the engine in hooks and tasks


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

    >>> class Counting(nn.Module): __module__, seen = "mine", 0
    >>> counting = Counting(); before = states_of({"model": counting})
    >>> counting.seen = 1
    >>> [path for path, state in states_of({"model": counting}).items() if before.get(path) != state]
    ['model.seen']
    """
    seen: set[int] = set()
    return dict(found for name, owner in owners.items() for found in _walk(name, owner, _DEPTH, seen))


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield path, repr(value)
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, cast("set[object]", value))))
    elif id(value) not in seen and depth and not isinstance(value, nn.Parameter):
        seen.add(id(value))
        if (state := _own_state(value)) is not None:
            yield path, sha256_of(state)
        else:
            for name, inner in _held(value):
                yield from _walk(f"{path}{name}", inner, depth - (not isinstance(value, nn.Module)), seen)


def _own_state(value: Any) -> object:
    """Content of a tensor or random generator, else None."""
    if isinstance(value, Tensor | np.ndarray):
        return value if np.prod(value.shape) < _LARGE else tuple(value.shape)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return cast("object", value.bit_generator.state)
    if isinstance(value, torch.Generator | np.random.RandomState):
        return cast("object", value.get_state())
    return None


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
