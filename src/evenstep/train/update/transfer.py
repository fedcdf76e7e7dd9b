"""Moves a batch to the model's device, and into its number and memory format, whatever it is made of.

Tensors are moved without blocking, containers are rebuilt around them, everything with a `to` of its own (a packed
sequence, a user's batch class) is asked to move itself, and all else stays. Where the model is of 16 bits, floating
tensors are cast on their way into it and out of it; complex ones and integers stay. Where it is in channels-last order,
so are its batches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.split import copied, marks, rebuilt
from evenstep.internals import pytree

Change: TypeAlias = Callable[[Any], Any]


def build_transfer(device: torch.device, cast_to: torch.dtype | None = None) -> Change | None:
    """The function that moves a batch to `device`; None where there is nothing to do: loaders give them on the CPU.

    Args:
        cast_to: what floating tensors become before they are moved; None leaves them.

    >>> batch = build_transfer(torch.device("meta"))({"x": [torch.ones(1), "name"]})
    >>> batch["x"][0].device.type, batch["x"][1]
    ('meta', 'name')
    """
    cast_before = build_cast(cast_to)
    if device.type == "cpu":
        return cast_before

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

    return transfer if cast_before is None else lambda batch: transfer(cast_before(batch))


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


@final
class LentBatches:
    """Who writes into the batches that it is given: such a task gets copies, so that what is done again begins alike.

    Whether one does shows before the first update, where losses are looked at, and in the first passes of each kind.

    Attributes:
        spoiled: the task that has written into the loader's own batch, in the update that is computed; None if none.

    >>> lent, batch = LentBatches(), {"x": torch.zeros(1)}; before = marks(batch)
    >>> _ = batch["x"].add_(1); lent.see("", batch, before); lent.lend("", batch)["x"] is batch["x"], lent.spoiled
    (False, None)
    """

    def __init__(self) -> None:
        self._writing, self._first = set[str](), dict[Any, int]()
        self.spoiled: str | None = None

    def looks(self, kind: Any, update: int) -> bool:
        """Whether passes of this kind are to be looked at: those of the update in which they are first made."""
        return self._first.setdefault(kind, update) == update

    def lend(self, task: str, batch: Any, *, apart: bool = False) -> Any:
        """What passes of a task are given.

        Args:
            apart: whether others are given the same one later, of whom this is not to be seen.
        """
        return copied(batch) if apart or task in self._writing else batch

    def see(self, task: str, batch: Any, before: list[Any], *, is_own: bool = False) -> None:
        """A pass was given `batch`, of which `before` are the marks.

        Args:
            is_own: whether an update that is done again would begin with this very batch.
        """
        if marks(batch) != before:
            self.spoiled = task if is_own and task not in self._writing else self.spoiled
            self._writing.add(task)


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
    """The same numbers in `format`; what is pinned stays so, or it would not move while the host goes on."""
    if not tensor.is_pinned():
        return tensor.to(format)
    return torch.empty_like(tensor, dtype=format, pin_memory=True).copy_(tensor)
