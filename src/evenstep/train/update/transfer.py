"""Moves a batch to the model's device, and casts it to the model's number and memory format."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.tree import rebuilt
from evenstep.internals import pytree

Change: TypeAlias = Callable[[Any], Any]


def build_transfer(device: torch.device) -> Change | None:
    """The function that moves a batch to `device`; None where there is nothing to do: loaders give them on the CPU.

    >>> batch = build_transfer(torch.device("meta"))({"x": [torch.ones(1), "name"]})
    >>> batch["x"][0].device.type, batch["x"][1]
    ('meta', 'name')
    """
    if device.type == "cpu":
        return None

    def transfer(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device, non_blocking=True)
        if isinstance(item, PackedSequence):  # a named tuple, of which one tensor must stay on the CPU
            return cast("Any", item).to(device, non_blocking=True)
        if not isinstance(item, Mapping | tuple | list) and hasattr(item, "to") and callable(item.to):
            return item.to(device)
        if isinstance(item, Mapping | tuple | list) or (dataclasses.is_dataclass(item) and not isinstance(item, type)):
            return rebuilt(item, transfer)
        return item

    return transfer


def build_cast(format: torch.dtype | None) -> Change | None:
    """The function that casts the floating tensors of anything to `format`; None leaves them, and gives None.

    >>> build_cast(torch.bfloat16)({"x": torch.ones(1), "index": torch.ones(1, dtype=torch.long)})
    {'x': tensor([1.], dtype=torch.bfloat16), 'index': tensor([1])}
    """
    if format is None:
        return None

    def cast_all(item: Any) -> Any:
        if isinstance(item, Tensor):
            return _cast(item, format) if item.is_floating_point() else item
        if isinstance(item, PackedSequence):
            return item._replace(data=cast_all(item.data))
        if isinstance(item, Mapping | tuple | list) or (dataclasses.is_dataclass(item) and not isinstance(item, type)):
            return rebuilt(item, cast_all)
        return item

    return cast_all


def channels_last(batch: object) -> object:
    """The same batch with every 4-dim floating-point tensor `[N, C, H, W]` in channels-last order.

    >>> images = channels_last({"images": torch.ones(2, 3, 4, 4), "labels": [1, 2]})["images"]
    >>> images.is_contiguous(memory_format=torch.channels_last)
    True
    """
    return pytree.tree_map_only(Tensor, _reordered, batch)


def _reordered(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _cast(tensor: Tensor, format: torch.dtype) -> Tensor:
    if not tensor.is_pinned():
        return tensor.to(format)
    return torch.empty_like(tensor, dtype=format, pin_memory=True).copy_(tensor)
