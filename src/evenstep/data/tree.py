"""Walks over the parts of a batch: dicts, lists, tuples, dataclasses, and the tensors and arrays in them."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.arguments import first_of, format_name
from evenstep.tensors import is_dense

PLAIN = (str, bytes, bool, int, float, complex, Enum, PurePath, torch.Size, torch.dtype, torch.device, slice)


def leaves(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays of a batch with their paths, those among the attributes of its objects included."""
    if isinstance(item, Tensor | np.ndarray):
        yield path, item
    elif is_list(item):
        for number, part in enumerate(item):
            yield from leaves(part, f"{path}[{number}]")
    elif is_container(item):
        for name, part in zip(_names(item), parts(item), strict=True):
            yield from leaves(part, f"{path}.{name}" if path else str(name))
    elif not isinstance(item, (*PLAIN, type)) and not callable(item):
        for name, value in getattr(item, "__dict__", {}).items():
            if isinstance(value, Tensor | np.ndarray):
                yield f"{path}.{name}", value


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if is_container(batch):  # once in every update, so without paths
        return [one for part in parts(batch) for one in tensors_in(part)]
    return [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)]


def num_elements(batch: Any) -> int:
    """Number of elements of the tensors of a batch, which its memory grows with."""
    return sum(leaf.size if isinstance(leaf, np.ndarray) else leaf.numel() for _, leaf in leaves(batch))


def contents(batch: Any, *, formats: bool = False) -> str:
    """Shapes of the tensors of a batch, for messages.

    >>> contents({"x": torch.zeros(6, 8), "y": torch.zeros(8)}), contents(torch.zeros(2, 3), formats=True)
    ('`x` [6, 8], `y` [8]', 'float32 [2, 3]')
    """
    found = [
        (f"`{path}` " if path else "") + (f"{format_name(leaf.dtype)} " if formats else "") + str(list(leaf.shape))
        for path, leaf in leaves(batch)
        if leaf.ndim and not getattr(leaf, "is_nested", False)
    ]
    return first_of(found, 4) if found else f"a {type(batch).__name__}"


def checksums(batch: Any) -> dict[str, int]:
    """Checksum of each tensor and array of a batch, by its path."""
    found: dict[str, int] = {}
    for path, leaf in leaves(batch):
        array = leaf
        if isinstance(leaf, Tensor) and is_dense(leaf):
            flat = leaf.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
            array = flat.view(torch.uint8).numpy()
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            found[path] = crc32(np.ascontiguousarray(array).data, crc32(repr((leaf.shape, leaf.dtype)).encode()))
    return found


def copied(item: Any) -> Any:
    """A copy of a batch: new tensors and containers; an object that can't be copied is shared."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if is_container(item):
        return rebuilt(item, copied)
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - such as a lock or an open file
        return item


def can_pin() -> bool:
    """True with an accelerator that reads pinned memory."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"


def pin(batch: Any) -> Any:
    """The same batch with its tensors of the host in pinned memory."""
    if isinstance(batch, Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if callable(method := getattr(batch, "pin_memory", None)):
        return method()
    return rebuilt(batch, pin) if is_container(batch) else batch


def rebuilt(item: Any, act: Callable[[Any], Any]) -> Any:
    """A container of the same kind that holds what `act` makes of the parts of `item`."""
    if isinstance(item, Mapping):
        mapping = cast("Mapping[Any, Any]", item)
        made = {name: act(value) for name, value in mapping.items()}
        return made if type(mapping) is dict else _mapping_like(mapping, made)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return cast("Any", type(item))(*map(act, cast("tuple[Any, ...]", item)))
    if isinstance(item, tuple | list):
        return type(item)(map(act, cast("list[Any]", item)))
    made = copy.copy(item)
    for field in dataclasses.fields(item):
        object.__setattr__(made, field.name, act(getattr(item, field.name)))  # it may be frozen
    return made


def _mapping_like(mapping: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if hasattr(mapping, "update"):  # a copy keeps attributes beside items, such as a default
        twin: Any = copy.copy(mapping)
        twin.update(made)
        return twin
    return cast("Any", type(mapping))(made)


def is_list(item: Any) -> bool:
    """True for a list or an unnamed tuple."""
    return isinstance(item, tuple | list) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


def is_container(item: Any) -> bool:
    """True for a mapping, list, tuple or dataclass."""
    if isinstance(item, tuple | list | Mapping):  # the slow check last
        return not isinstance(item, torch.Size | PackedSequence)
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def parts(item: Any) -> list[Any]:
    """Parts of a container, in the order of `rebuilt`."""
    if isinstance(item, tuple | list):
        return list(cast("list[Any]", item))
    if isinstance(item, Mapping):
        return list(cast("Mapping[Any, Any]", item).values())
    return [getattr(item, field.name) for field in dataclasses.fields(item)]


def _names(item: Any) -> list[Any]:
    if isinstance(item, tuple | Mapping):
        return list(getattr(item, "_fields", cast("Any", item)))
    return [field.name for field in dataclasses.fields(item)]
