"""sha256 of trees of tensors and numbers, and of the state that a run's objects hold."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data.seeding import generator_state, is_generator

_DEPTH = 5
_MOST = 20_000
_LARGE = 1 << 22  # elements
_OF_TORCH = ("_parameters", "_modules", "_buffers", "training", "_non_persistent_buffers_set")
_OF_ENGINE = ("_trainer", "_now")  # set by the engine in hooks and tasks
_OF_OPTIMIZER = ("state", "param_groups", "defaults")  # compared through its `state_dict`


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
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, owner in owners.items():
        for path, digest in _walk(name, owner, _DEPTH, seen):
            found.setdefault(path, digest)
            if len(found) >= _MOST:
                return found
    return found


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield path, repr(value)
        return
    if id(value) in seen or not depth or isinstance(value, nn.Parameter):
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        yield path, sha256_of(_ends(value))
    elif is_generator(type(value)):
        yield path, sha256_of(generator_state(value))
    else:
        for name, inner in _held(value):
            yield from _walk(f"{path}{name}", inner, depth - (not isinstance(value, nn.Module)), seen)


def _held(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in cast("Mapping[object, object]", value).items()]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", inner) for index, inner in enumerate(cast("list[object]", value))]
    if isinstance(value, set | frozenset):
        return [("", repr(sorted(map(repr, cast("set[object]", value)))))]
    attributes: dict[str, Any] = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, type) or (callable(value) and not isinstance(value, nn.Module) and not attributes):
        return []
    if isinstance(value, nn.Module):
        attributes |= {**dict(value.named_buffers(recurse=False)), **dict(value.named_children())}
    if _is_ours(value):
        attributes = {name: inner for name, inner in attributes.items() if not _is_plain(inner)}
    left_out = _OF_OPTIMIZER if isinstance(value, Optimizer) else ()
    return [
        (f".{name}", inner)
        for name, inner in attributes.items()
        if name not in (*_OF_TORCH, *_OF_ENGINE, *left_out) and "_hooks" not in name
    ]


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith("evenstep.")


def _is_plain(value: object) -> bool:
    return type(value).__module__ in ("builtins", "collections", "torch") or value is None


def _ends(value: Any) -> object:
    if isinstance(value, Tensor):
        large = value.numel() > _LARGE
        flat = value.detach().flatten() if large else value
    else:
        large = value.size > _LARGE
        flat = value.ravel() if large else value
    return (tuple(value.shape), flat[:4096], flat[-4096:]) if large else value
