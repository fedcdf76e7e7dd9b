"""Tensors that one rank alone holds, whole, and how others come by them."""

from collections.abc import Mapping
from typing import Any

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
        mine, rank = dict(own), self.group.rank

        def ref(tensor: Tensor, local: Tensor) -> ShardedTensorRef:
            return ShardedTensorRef(local=local, shape=tuple(tensor.shape), owner=rank)

        everybody = self.group.gather(mapped(mine, lambda one: ref(one, torch.empty(0, dtype=one.dtype))))
        everybody[rank] = mapped(mine, lambda one: ref(one, one))
        return {str(owner): tree for owner, tree in enumerate(everybody)}
