"""sha256 of trees of tensors and numbers, and of whatever else has a state."""

import hashlib
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data.seeding import generator_state, is_generator

_States = Iterator[tuple[str, str]]
_Inside = list[tuple[str, Any]]
_DEPTH = 9
_MOST = 20_000
_LARGE = 1 << 22  # elements
_TORCH = ("_parameters", "_modules", "_buffers", "training")
_OURS = ("_trainer", "_now")  # what an engine puts into hooks and tasks
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "_need_device_dtype_check_for_fused", "_opt_called")
_OPEN = ("torch.utils.data.", "torch.optim.")  # parts of torch that hold what users count by
_NO_STATE = (type, ModuleType, FunctionType, MethodType, property, classmethod, staticmethod, torch.dtype, torch.device)


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

    It goes into attributes, of classes as well, containers, closures, the globals that functions name, and modules;
    generators of random numbers are told by their states.

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
    elif is_generator(type(value)):
        yield way, f"generator {sha256_of(generator_state(value))}"
    else:
        home = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
        still_ours = str(home).startswith(("evenstep.", "torch.utils.data.")) or (
            ours and home in ("builtins", "functools", "collections")
        )
        for name, inner in _inside(value):
            here = f"{root}.{name.lstrip('._')}" if still_ours and name else f"{way}{name}"
            here = name[1:] if name.startswith("@") else here  # a global, whoever names it
            less = not isinstance(value, nn.Module)
            yield from _walked(here, root, inner, depth - less, seen, ours=still_ours)


def ends_of(value: Any) -> object:
    """A tensor, or only the ends of one that is as large as a data set."""
    if isinstance(value, Tensor):
        large = value.numel() > _LARGE
        flat = value.detach().flatten() if large else value
        return (tuple(value.shape), flat[:4096], flat[-4096:]) if large else value
    return (value.shape, value.ravel()[:4096], value.ravel()[-4096:]) if value.size > _LARGE else value


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
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
            *of_class(value),
        ]
    if isinstance(value, partial):
        held = cast("Any", value)
        return [("", held.func), *((f"({index})", one) for index, one in enumerate(held.args)), ("", held.keywords)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if _is_cached(value):
        return [(".cache_info().currsize", value.cache_info().currsize), ("", value.__wrapped__)]
    if isinstance(value, Optimizer):
        return [(f".{name}", one) for name, one in vars(value).items() if name not in _OF_OPTIMIZERS]
    home = type(value).__module__
    if isinstance(value, type) or (home.partition(".")[0] == "torch" and not home.startswith(_OPEN)):
        return ()
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    slots = [name for name in getattr(type(value), "__slots__", ()) if isinstance(name, str) and hasattr(value, name)]
    inner = {**{name: getattr(value, name) for name in slots}, **attributes}
    return [*((f".{name}", one) for name, one in inner.items() if name not in _OURS), *of_class(value)]


def of_class(value: object) -> _Inside:
    """What the classes of an object hold that somebody has written for it, and what their methods hold."""
    found: _Inside = []
    for kind in type(value).__mro__:
        if not _is_written_for_it(kind.__module__):
            continue
        for name, one in vars(kind).items():
            if isinstance(one, FunctionType) or _is_cached(one):
                inner = ((way, held) for way, held in _inside(one) if way or not isinstance(one, FunctionType))
                found += [(way if way.startswith("@") else f".{name}{way}", held) for way, held in inner]
            elif not name.startswith("__") and not isinstance(one, _NO_STATE) and not callable(one):
                found.append((f".{name}", one))
    return found


def _of_function(function: FunctionType) -> _Inside:
    """What a function holds: its closure, its defaults, attributes that were given to it, and globals that it names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found: _Inside = [(f".{name}", cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if not _is_written_for_it(function.__module__):
        return found
    found += [(f".{name}", one) for name, one in vars(function).items() if name != "__wrapped__"]
    count, names = function.__code__.co_argcount, function.__code__.co_varnames
    defaults = function.__defaults__ or ()
    found += [(f"({name}=…)", one) for name, one in zip(names[count - len(defaults) : count], defaults, strict=True)]
    held, file = function.__globals__, function.__module__
    named = [name for name in sorted(_named_in(function.__code__)) if name in held]
    return found + [(f"@global {file}.{name}", held[name]) for name in named if not isinstance(held[name], _NO_STATE)]


@cache
def _is_written_for_it(module: str) -> bool:
    """Whether a module is somebody's own, and not of a library."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    folders = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), Path(__file__).parents[2]]
    return not any(Path(file).is_relative_to(folder) for folder in folders)


def _is_cached(value: object) -> TypeGuard[Any]:
    """Whether it is a function that remembers what it gave (`functools.lru_cache`)."""
    return type(value).__name__ == "_lru_cache_wrapper"


def _named_in(code: CodeType) -> set[str]:
    """The names that code asks of its module, with what is defined inside of it."""
    inner = (_named_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return False
    return True


def is_torchs(name: str) -> bool:
    """Whether an attribute of a module is torch's own."""
    return name in _TORCH or name.endswith("_hooks") or "_hooks_" in name or name == "_non_persistent_buffers_set"
