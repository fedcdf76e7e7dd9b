"""Tensors that one rank alone holds, whole, and how others come by them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.parallel.layout import ParameterLayout, ShardedTensorRef, States, mapped


class OwnStates(ParameterLayout):
    """Every rank holds tensors of its own, whole: where each steps alone, a model and an optimizer's state."""

    @property
    def shard_index(self) -> int:
        return self.group.rank

    @property
    def num_shards(self) -> int:
        return self.group.ranks

    def gather_full(self, tensor: Tensor | ShardedTensorRef) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        is_mine = tensor.owner == self.group.rank
        own = tensor.local if is_mine else torch.empty(tensor.shape, dtype=tensor.local.dtype)
        carried = own.to(self.group.device).contiguous()
        self.group.broadcast([carried], tensor.owner)
        return carried.to(own.device)

    def of_all(self, own: Mapping[str, Any]) -> States:
        """The trees of all ranks by number, from this rank's; each tensor of them is a `ShardedTensorRef`."""
        trees, rank = self.group.gather(mapped(dict(own), _Shape)), self.group.rank
        return {
            str(owner): _filled(shapes, own if owner == rank else None, partial(self._ref, owner))
            for owner, shapes in enumerate(trees)
        }

    def _ref(self, owner: int, mine: Any, shape: "_Shape") -> ShardedTensorRef:
        local = mine if owner == self.group.rank else torch.empty(0, dtype=shape.dtype)
        return ShardedTensorRef(local=local, shape=shape.size, owner=owner)


class _Shape:
    """What another rank must know of a tensor to receive it."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype = tuple(tensor.shape), tensor.dtype


def _filled(shapes: Any, mine: Any, tensor_of: Callable[[Any, _Shape], Any]) -> Any:
    """A state like `shapes`, with the tensor for each `_Shape`; `mine` is this rank's own, where it has one."""
    if isinstance(shapes, _Shape):
        return tensor_of(mine, shapes)
    if isinstance(shapes, dict):
        described = cast("dict[Any, Any]", shapes)
        return {k: _filled(shape, None if mine is None else mine[k], tensor_of) for k, shape in described.items()}
    if type(shapes) in (list, tuple):
        own: list[Any] = [None] * len(shapes) if mine is None else mine
        return type(shapes)(_filled(shape, one, tensor_of) for shape, one in zip(shapes, own, strict=True))
    return shapes
