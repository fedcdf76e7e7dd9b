"""Copies batches into pinned memory."""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor


def can_pin() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"


def pin(batch: object) -> object:
    """The same batch with every tensor of the host in pinned memory; those on a device stay there.

    >>> pin({"text": ["a", "b"]})
    {'text': ['a', 'b']}
    """
    if isinstance(batch, Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    method = cast("Callable[[], object] | None", getattr(batch, "pin_memory", None))
    if method is not None:
        return method()
    if isinstance(batch, Mapping):
        mapping = cast(Mapping[object, object], batch)
        pinned = {name: pin(value) for name, value in mapping.items()}
        if not isinstance(mapping, MutableMapping):
            return cast(Any, type(mapping))(pinned)
        # A copy keeps what a mapping holds besides its items, such as the default of a defaultdict.
        clone = copy(mapping)
        clone.update(pinned)
        return clone
    if isinstance(batch, list):
        return [pin(part) for part in cast(list[object], batch)]
    if isinstance(batch, tuple):
        whole = cast(tuple[object, ...], batch)
        parts = [pin(part) for part in whole]
        is_named = hasattr(whole, "_fields")
        return cast(Any, type(whole))(*parts) if is_named else cast(Any, type(whole))(parts)
    return batch
