"""Moves a batch to the model's device, and casts it to the model's number and memory format."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.tree import is_container, rebuilt
from evenstep.internals import pytree

Change: TypeAlias = Callable[[Any], Any]


def build_transfer(device: torch.device) -> Change | None:
    """The function that moves a batch to `device`; None for the CPU, where loaders give batches."""
    if device.type == "cpu":
        return None

    def transfer(item: Any) -> Any:
        # of a packed sequence, a named tuple, one tensor must stay on the CPU
        if isinstance(item, Tensor | PackedSequence):
            return cast("Any", item).to(device, non_blocking=True)
        if callable(getattr(item, "to", None)) and not isinstance(item, Mapping | tuple | list):
            return item.to(device)
        return rebuilt(item, transfer) if is_container(item) else item

    return transfer


def build_cast(format: torch.dtype | None) -> Change | None:
    """The function that casts the floating tensors of anything to `format`; None leaves them, and gives None."""
    if format is None:
        return None

    def cast_all(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(format) if item.is_floating_point() else item
        if isinstance(item, PackedSequence):
            return item._replace(data=cast_all(item.data))
        return rebuilt(item, cast_all) if is_container(item) else item

    return cast_all


def channels_last(batch: object) -> object:
    """The same batch with every 4-dim floating-point tensor `[N, C, H, W]` in channels-last order."""

    def reorder(tensor: Tensor) -> Tensor:
        is_images = tensor.ndim == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if is_images else tensor

    return pytree.tree_map_only(Tensor, reorder, batch)
