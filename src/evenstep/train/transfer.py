"""Moves a batch to the model's device, whatever it is made of.

Tensors are moved without blocking, containers are rebuilt around them, everything with a `to` of its own (a packed
sequence, a user's batch class) is asked to move itself, and all else stays. It does not cast.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.train.split import rebuilt


def build_transfer(device: torch.device) -> Callable[[Any], Any]:
    """The function that moves a batch to `device`. Loaders give batches on the CPU, where there is nothing to move.

    >>> batch = build_transfer(torch.device("cpu"))({"x": [torch.ones(1), "name"]})
    >>> batch["x"][1]
    'name'
    """

    if device.type == "cpu":
        return _as_it_is

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


def _as_it_is(batch: Any) -> Any:
    return batch
