"""Blocks of tensors that are cut over ranks, and the table `tensors.json` of a checkpoint.

`tensors.json` has dtype and shape of each `PART/TENSOR`, and its pieces: offsets, sizes, file, name, checksums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evenstep.checkpoint.state import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorPiece(NamedTuple):
    """A block of a tensor in a file.

    Args:
        offsets, sizes: of the block in the tensor, by dimension.
        crc32: checksum of each chunk; none before it is written.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str
    crc32: tuple[int, ...] = ()


class TensorEntry(NamedTuple):
    """A tensor in a checkpoint, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


def whole_entry(tensor: Tensor, file: str, name: str) -> TensorEntry:
    """The entry of a tensor of one piece."""
    shape = tuple(tensor.shape)
    return TensorEntry(tensor.dtype, shape, (TensorPiece((0,) * len(shape), shape, file, name),))


def table_content(table: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        name: {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "pieces": [piece._asdict() for piece in entry.pieces],
        }
        for name, entry in table.items()
    }


def parse_table(content: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), tuple(map(_parse_piece, entry["pieces"])))
        for name, entry in content.items()
    }


def _parse_piece(content: Mapping[str, Any]) -> TensorPiece:
    places = {key: tuple(content[key]) for key in ("offsets", "sizes", "crc32")}
    return TensorPiece(file=content["file"], name=content["name"], **places)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The block that this rank holds of a tensor that is cut over ranks without being a DTensor.

    Args:
        local: the block; on a rank that holds nothing, any tensor of the same dtype without elements.
        shape: of the whole tensor.
        offsets: first element of the block in it, by dimension.

    >>> Shard(local=torch.zeros(2, 3), shape=(4, 3), offsets=(2, 0)).size()
    torch.Size([4, 3])
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """True if this rank has no element of a tensor that has some."""
        return self.local.numel() == 0 and 0 not in self.shape

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.shape)

    # the planner of torch.distributed.checkpoint asks an object for its pieces by these three methods
    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        index = MetadataIndex(fqn, self.offsets)
        properties = TensorProperties.create_from_tensor(self.local)
        data = [TensorWriteData(chunk, properties, self.size()) for chunk in self.__create_chunk_list__()]
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=one) for one in data]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [] if self.is_empty else [ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)]

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.local


def whole_shard(tensor: Tensor) -> Shard:
    """The only block of a tensor that this rank alone holds."""
    return Shard(local=tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())


def outline(tensor: Tensor | Shard) -> Shard:
    """An empty block of a tensor that another rank holds.

    >>> outline(torch.zeros(4, 3)).is_empty
    True
    """
    shape = tuple(tensor.shape)
    dtype = tensor.local.dtype if isinstance(tensor, Shard) else tensor.dtype
    local = torch.empty(shape if 0 in shape else 0, dtype=dtype)
    return Shard(local=local, shape=shape, offsets=(0,) * len(shape))
