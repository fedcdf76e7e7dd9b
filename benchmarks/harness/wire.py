"""Counts what a contender gives to collectives: kind, dtype and bytes, whoever calls them.

It looks where torch dispatches collectives of any caller, in Python or in DDP's C++ reducer, so all contenders are
counted alike. What a backend adds to the payload, such as headers, is not seen.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Counts while it is entered, in the thread that has entered it.

    `bytes` holds, by (kind, dtype), the bytes of the tensors that this process gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            for tensor in _first_tensors(args):
                kind = str(func.__name__).partition(".")[0].rstrip("_")
                self.bytes[kind, tensor.dtype] += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def _first_tensors(args: Sequence[Any]) -> list[Tensor]:
    """Those of the first argument that has any: what is sent, or for a gather what is received."""
    for arg in args:
        found = _tensors(arg)
        if found:
            return found
    return []


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, list | tuple):
        return [tensor for part in cast("list[Any]", item) for tensor in _tensors(part)]
    return []
