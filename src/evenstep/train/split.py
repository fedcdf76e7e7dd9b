"""Cuts a batch in halves along its samples, whatever it is made of.

Samples are the first dimension of a batch's tensors: each tensor as long as the first one is cut, lists of as many
strings or numbers are cut as well, everything else goes to both halves. It does not know what a batch means; a task
whose batches are made otherwise (packed sequences, graphs) says so in `Task.split`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor


def num_samples(batch: Any) -> int | None:
    """The first dimension of the first tensor in `batch`; None where there is no tensor with a dimension.

    >>> import torch
    >>> num_samples({"name": ["a", "b"], "x": (torch.tensor(1.0), torch.zeros(2, 5))})
    2
    """
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim), None)


def num_elements(batch: Any) -> int:
    """How many numbers the tensors of `batch` hold: what its memory grows with, also where lengths differ.

    >>> import torch
    >>> num_elements([torch.zeros(2, 5), torch.zeros(2)])
    12
    """
    return sum(tensor.numel() for tensor in tensors_in(batch))


def tensors_in(item: Any) -> list[Tensor]:
    """The tensors of a pytree, in order."""
    if isinstance(item, Tensor):
        return [item]
    return [tensor for part in _parts(item) for tensor in tensors_in(part)]


def halves(batch: Any) -> list[Any]:
    """`batch` as two batches, the first of which is not the smaller one; or as itself, where it can't be cut.

    >>> import torch
    >>> halves((torch.arange(3), ["a", "b", "c"]))
    [(tensor([0, 1]), ['a', 'b']), (tensor([2]), ['c'])]
    >>> len(halves(torch.zeros(1, 7)))
    1
    """
    count = num_samples(batch)
    if count is None or count < 2:
        return [batch]
    middle = (count + 1) // 2
    return [_part(batch, slice(0, middle), count), _part(batch, slice(middle, count), count)]


def _part(item: Any, part: slice, count: int) -> Any:
    if isinstance(item, Tensor):
        return item[part] if item.ndim and item.shape[0] == count else item
    if isinstance(item, list) and len(cast("list[Any]", item)) == count and not _parts_with_tensors(item):
        return cast("list[Any]", item)[part]
    if isinstance(item, Mapping):
        mapping = cast("Mapping[Any, Any]", item)
        cut = {name: _part(value, part, count) for name, value in mapping.items()}
        return cut if type(mapping) is dict else cast("Any", type(mapping))(cut)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return cast("Any", type(item))(*(_part(one, part, count) for one in cast("tuple[Any, ...]", item)))
    if isinstance(item, tuple | list):
        return type(item)(_part(one, part, count) for one in cast("list[Any]", item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {field.name: _part(getattr(item, field.name), part, count) for field in dataclasses.fields(item)}
        return dataclasses.replace(item, **fields)
    return item


def _parts_with_tensors(item: Any) -> bool:
    return any(isinstance(part, Tensor | Mapping | tuple | list) for part in _parts(item))


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(cast("Mapping[Any, Any]", item).values())
    if isinstance(item, tuple | list):
        return list(cast("list[Any]", item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return []
