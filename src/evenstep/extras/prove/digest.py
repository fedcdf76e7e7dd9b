"""sha256 of trees of tensors and numbers, and of whatever else has a state."""

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_States = Iterator[tuple[str, str]]
_DEPTH = 9
_MOST = 20_000
_LARGE = 1 << 22  # elements
_TORCH = ("_parameters", "_modules", "_buffers", "training")
_OURS = ("_trainer", "_now")  # what an engine puts into hooks and tasks


def sha256_of(tree: object) -> str:
    """sha256 over all tensors and numbers of a state; names count, and not the order in which they were put in.

    >>> one, other = {"a": torch.zeros(2), "b": 1}, {"b": 1, "a": torch.zeros(2)}
    >>> sha256_of(one) == sha256_of(other)
    True
    """
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
    """What objects hold beside a model's parameters: the sha256 of each value, by the way that leads to it.

    It goes into attributes, containers, closures and modules; generators of random numbers are told by their states.

    >>> class Counting(nn.Module): __module__, seen = "mine", 0
    >>> counting = Counting(); before = states_of({"model": counting})
    >>> counting.seen = 1
    >>> [way for way, state in states_of({"model": counting}).items() if before.get(way) != state]
    ['model.seen']
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, owner in owners.items():
        for way, value in _walked(name, name, owner, _DEPTH, seen):
            found.setdefault(way, value)
            if len(found) >= _MOST:
                return found
    return found


def _walked(way: str, root: str, value: Any, depth: int, seen: set[int], *, ours: bool = False) -> _States:
    """What is below `value`, but for what objects of this package hold themselves (`ours`): that they save."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        if not ours:
            yield way, repr(value)
        return
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nn.Parameter) and not isinstance(value, nn.UninitializedParameter):
        return
    if isinstance(value, Tensor | np.ndarray):
        if not ours:
            yield way, sha256_of(ends_of(value))
    elif (state := generator_state(value)) is not None:
        yield way, f"generator {sha256_of(state)}"
    else:
        home = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
        still_ours = str(home).startswith("evenstep.") or (ours and home in ("builtins", "functools", "collections"))
        for name, inner in _inside(value):
            here = f"{root}.{name.lstrip('._')}" if still_ours and name else f"{way}{name}"
            less = not isinstance(value, nn.Module)
            yield from _walked(here, root, inner, depth - less, seen, ours=still_ours)


def ends_of(value: Any) -> object:
    """A tensor, or only the ends of one that is as large as a data set."""
    if isinstance(value, Tensor):
        large = value.numel() > _LARGE
        flat = value.detach().flatten() if large else value
        return (tuple(value.shape), flat[:4096], flat[-4096:]) if large else value
    return (value.shape, value.ravel()[:4096], value.ravel()[-4096:]) if value.size > _LARGE else value


def generator_state(value: Any) -> object:
    """The state of a generator of random numbers; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None


def _inside(value: Any) -> Iterable[tuple[str, object]]:
    """What an object holds, with what is written behind its name to get there."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in list(cast("Mapping[object, object]", value).items())]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", inner) for index, inner in enumerate(cast("list[object]", value))]
    if isinstance(value, set | frozenset):
        return [("", repr(sorted(map(repr, cast("set[object]", value)))))]
    if isinstance(value, nn.Module):
        own = {name: one for name, one in vars(value).items() if not is_torchs(name)}
        return [
            *((f".{name}", one) for name, one in (dict(value.named_buffers(recurse=False)) | own).items()),
            *((f".{name}", one) for name, one in value.named_children()),
        ]
    if isinstance(value, partial):
        held = cast("Any", value)
        return [("", held.func), *((f"({index})", one) for index, one in enumerate(held.args)), ("", held.keywords)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f".{name}", cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if isinstance(value, type) or type(value).__module__.partition(".")[0] == "torch":
        return ()
    if isinstance(value, Optimizer):
        return [(f".{name}", one) for name, one in vars(value).items() if name not in ("state", "param_groups")]
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    slots = [name for name in getattr(type(value), "__slots__", ()) if isinstance(name, str) and hasattr(value, name)]
    inner = {**{name: getattr(value, name) for name in slots}, **attributes}
    return [(f".{name}", one) for name, one in inner.items() if name not in _OURS]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return False
    return True


def is_torchs(name: str) -> bool:
    """Whether an attribute of a module is torch's own."""
    return name in _TORCH or name.endswith("_hooks") or "_hooks_" in name or name == "_non_persistent_buffers_set"
