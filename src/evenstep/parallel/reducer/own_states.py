"""Who holds what where each rank steps alone: everybody all of its own, and what they share is in all of these."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evenstep.parallel.group import Group
from evenstep.parallel.layout import ParameterLayout, ShardedTensorRef, States
from evenstep.parallel.reducer.zero1 import Owners


class OwnStates(ParameterLayout):
    """Every rank holds a model and an optimizer state of its own, whole; what they share is the same on all."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._owners = Owners(group)

    @property
    def shard_index(self) -> int:
        return self.group.rank

    @property
    def num_shards(self) -> int:
        return self.group.ranks

    def gather_full(self, tensor: Tensor | ShardedTensorRef) -> Tensor:
        return self._owners.gather_full(tensor)

    def of_all(self, own: Mapping[str, Any]) -> States:
        """The trees of all ranks by number, from this rank's; each tensor of them is a `ShardedTensorRef`."""
        return {str(rank): theirs for rank, theirs in enumerate(self._owners.of_ranks(own))}
