"""Tensors that are cut over ranks without being DTensors: what a state holds in the place of one."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from evenstep.checkpoint.table import is_inside
from evenstep.errors import ArgumentError


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The block of a tensor that this rank holds, for tensors that are cut over ranks without being DTensors.

    Args:
        local: the block; any tensor without elements, of the same dtype, on a rank that holds nothing.
        offsets: where the block begins in it, one per dimension.

    Raises:
        ArgumentError: a block that is not inside the tensor.

    >>> Shard(local=torch.zeros(2, 3), shape=(4, 3), offsets=(2, 0)).local.shape
    torch.Size([2, 3])
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(self.local.shape)
        if not self.is_empty and not is_inside(self.offsets, sizes, self.shape):
            raise ArgumentError(
                f"a block of shape {list(sizes)} at {list(self.offsets)} must lie inside its tensor of shape "
                f"{list(self.shape)}, but does not; give `offsets` one number per dimension."
            )

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of a tensor that has something."""
        return self.local.numel() == 0 and 0 not in self.shape

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.shape)

    # The three methods by which the planner of torch.distributed.checkpoint asks an object for its pieces.
    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [] if self.is_empty else [ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)]

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.local


def outline(tensor: Tensor | Shard) -> Shard:
    """A block of nothing of a tensor that another rank holds, whole or cut.

    >>> outline(torch.zeros(4, 3)).is_empty
    True
    """
    shape = tuple(tensor.shape)
    dtype = tensor.local.dtype if isinstance(tensor, Shard) else tensor.dtype
    local = torch.empty(shape if 0 in shape else 0, dtype=dtype)
    return Shard(local=local, shape=shape, offsets=(0,) * len(shape))
