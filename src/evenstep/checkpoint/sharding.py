"""Tensors that are cut over ranks, and the table that says which piece of which lies where.

    state.json                what is not a tensor, as in every checkpoint
    rank-00000.safetensors    the pieces that this rank wrote, each under the name `PART/TENSOR@OFFSETS`
    tensors.json              `PART/TENSOR` → dtype, shape, pieces: offsets, sizes, file, range of bytes

A table is believed only if its pieces lie inside their files, no two share a byte, and those of a tensor cover it
exactly. Nothing here opens a file or talks to other ranks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.manifest import FileEntry
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensorfile import DTYPES, BadFileError
from evenstep.errors import ArgumentError

TABLE = "tensors.json"
_MAX_NUMEL = 2**59


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The block of a tensor that this rank holds, for tensors that are cut over ranks without being DTensors.

    Args:
        local: the block; any tensor without elements, of the same dtype, on a rank that holds nothing.
        shape: of the whole tensor.
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
        if not self.is_empty and not _inside(self.offsets, sizes, self.shape):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a tensor in a file.

    Args:
        offsets, sizes: of the block in the tensor, one per dimension.
        file: that holds it.
        begin, end: its bytes in the file, in row-major order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a checkpoint: what it is, and where its pieces lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


Table = Mapping[str, Stored]


def piece_key(name: str, offsets: Sequence[int]) -> str:
    """The name of a piece in its file.

    >>> piece_key("model/weight", (4, 0))
    'model/weight@4,0'
    """
    return f"{name}@{','.join(map(str, offsets))}"


def table_bytes(table: Table) -> bytes:
    """The content of `tensors.json`."""
    content = {
        name: {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": stored.shape,
            "pieces": [
                {"offsets": p.offsets, "sizes": p.sizes, "file": p.file, "bytes": [p.begin, p.end]}
                for p in stored.pieces
            ],
        }
        for name, stored in table.items()
    }
    return json.dumps(content, separators=(",", ":")).encode()


def parse_table(content: Mapping[str, object], files: Mapping[str, FileEntry]) -> Table:
    """The table in the content of `tensors.json`.

    Args:
        content: as JSON gave it.
        files: of the checkpoint, as the manifest names them.

    Raises:
        BadFileError: a table that cannot be true of these files; told before memory is taken for any tensor.
    """
    table = {name: _parse_stored(name, entry, files) for name, entry in content.items()}
    for file in files:
        ranges = sorted((p.begin, p.end, name) for name, t in table.items() for p in t.pieces if p.file == file)
        for (_, end, one), (begin, _, other) in pairwise(ranges):
            if begin < end:
                raise BadFileError(f"gives `{one}` and `{other}` the same bytes of `{file}`")
    return table


def _parse_stored(name: str, entry: object, files: Mapping[str, FileEntry]) -> Stored:
    match entry:
        case {"dtype": str(dtype_name), "shape": list(), "pieces": list()} if dtype_name in DTYPES:
            fields = cast("dict[str, list[object]]", entry)
            shape, dtype = _sizes(fields["shape"]), DTYPES[dtype_name]
            pieces = tuple(_parse_piece(piece, dtype, files) for piece in fields["pieces"])
            if shape is None or None in pieces or math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:
                raise BadFileError(f"describes tensor `{name}` in no known way")
            stored = Stored(dtype=dtype, shape=shape, pieces=cast("tuple[Piece, ...]", pieces))
            check_cover(name, stored)
            return stored
        case _:
            raise BadFileError(f"describes tensor `{name}` in no known way")


def _parse_piece(piece: object, dtype: torch.dtype, files: Mapping[str, FileEntry]) -> Piece | None:
    match piece:
        case {"offsets": list(), "sizes": list(), "file": str(file), "bytes": [int(begin), int(end)]} if file in files:
            fields = cast("dict[str, list[object]]", piece)
            offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
            if offsets is None or sizes is None or not 0 <= begin <= end <= files[file].bytes:
                return None
            if end - begin != math.prod(sizes) * dtype.itemsize:
                return None
            return Piece(offsets=offsets, sizes=sizes, file=file, begin=begin, end=end)
        case _:
            return None


def _sizes(values: list[object]) -> tuple[int, ...] | None:
    sizes = tuple(value for value in values if type(value) is int and value >= 0)
    return sizes if len(sizes) == len(values) else None


def check_cover(name: str, stored: Stored) -> None:
    """Raise BadFileError unless the pieces of the tensor cover it, each element once."""
    pieces = sorted(stored.pieces, key=lambda piece: piece.offsets)
    for piece in pieces:
        if not _inside(piece.offsets, piece.sizes, stored.shape):
            raise BadFileError(f"has a piece of tensor `{name}` at {list(piece.offsets)} that is not inside it")
    held = sum(math.prod(piece.sizes) for piece in pieces)
    if held != math.prod(stored.shape):
        raise BadFileError(f"has {held} of the {math.prod(stored.shape)} elements of tensor `{name}`")
    for number, one in enumerate(pieces):
        for other in pieces[number + 1 :]:
            if stored.shape and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # sorted by the first offset: all that follow begin behind as well
            if _overlap(one, other):
                raise BadFileError(f"has the element at {list(other.offsets)} of tensor `{name}` twice")


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        a < b + n and b < a + m for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
