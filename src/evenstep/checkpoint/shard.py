"""Tensors that are cut over ranks: which rank writes which block, and the table `tensors.json` of a checkpoint.

`tensors.json` has dtype and shape of each `PART/TENSOR`, and its pieces: offsets, sizes, file, name, checksums.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evenstep.checkpoint.tensor_file import DTYPE_NAMES, SUFFIX
from evenstep.errors import CheckpointError

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
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def is_sharded(value: object) -> bool:
    """True for a tensor that is cut over ranks: a `Shard`, or a DTensor."""
    return isinstance(value, Shard) or hasattr(type(value), "__create_chunk_list__")


def local_of(leaf: Any) -> Tensor:
    """This rank's block of a tensor that is cut over ranks."""
    return (leaf.local if isinstance(leaf, Shard) else leaf.to_local()).detach()


def whole_shard(tensor: Tensor) -> Shard:
    """The only block of a tensor that this rank alone holds."""
    return Shard(local=tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())


def outline(tensor: Tensor | Shard) -> Shard:
    """An empty block of a tensor that another rank holds.

    >>> outline(torch.zeros(4, 3)).local.shape
    torch.Size([0])
    """
    shape = tuple(tensor.shape)
    dtype = tensor.local.dtype if isinstance(tensor, Shard) else tensor.dtype
    local = torch.empty(shape if 0 in shape else 0, dtype=dtype)
    return Shard(local=local, shape=shape, offsets=(0,) * len(shape))


class Block(NamedTuple):
    """Place of a block of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def block_of(leaf: Any) -> Block | None:
    """The block that this rank holds of a whole or cut tensor; None if it has no element of a tensor that has some."""
    shape = sizes = tuple(leaf.shape)
    offsets = (0,) * len(shape)
    if isinstance(leaf, Shard):
        offsets, sizes = leaf.offsets, tuple(leaf.local.shape)
    elif is_sharded(leaf):
        (chunk,) = leaf.__create_chunk_list__()
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    if 0 in sizes and 0 not in shape:
        return None
    return Block(leaf.local.dtype if isinstance(leaf, Shard) else leaf.dtype, shape, offsets, sizes)


def dealt(everybody: Sequence[Mapping[str, Block | None]]) -> dict[str, TensorEntry]:
    """Entries of tensors from the blocks of all ranks. A block is written by its holder with the fewest bytes so far.

    >>> whole = {"w": block_of(torch.zeros(3)), "b": block_of(torch.zeros(1))}
    >>> [entry.pieces[0].file for entry in dealt([whole, whole]).values()]
    ['rank-00000.safetensors', 'rank-00001.safetensors']
    """
    num_bytes = [0] * len(everybody)  # that each rank writes
    return {name: _entry(name, [blocks[name] for blocks in everybody], num_bytes) for name in everybody[0]}


def whole_entry(path: str, tensor: Tensor) -> TensorEntry:
    """The entry of a tensor that rank 0 writes, into the file of its part."""
    part, _, name = path.partition("/")
    shape = tuple(tensor.shape)
    return TensorEntry(tensor.dtype, shape, (TensorPiece((0,) * len(shape), shape, f"{part}{SUFFIX}", name),))


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}{SUFFIX}"


def _entry(name: str, blocks: Sequence[Block | None], num_bytes: list[int]) -> TensorEntry:
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(blocks):
        if block is not None:
            holders.setdefault(block, []).append(rank)
    formats = {(block.dtype, block.shape) for block in holders}
    dtype, shape = min(formats, key=repr, default=(torch.uint8, ()))
    whole = Block(dtype, shape, (0,) * len(shape), shape)
    if len(formats) != 1 or not _fill(holders, whole):
        raise CheckpointError(
            f"the ranks hold {len(holders)} blocks of `{name}`, which do not make up one tensor; give each element by "
            f"one rank, or by several in the same block.",
            field=name,
        )
    pieces: list[TensorPiece] = []
    for block, ranks in holders.items():
        rank = min(ranks, key=num_bytes.__getitem__)
        num_bytes[rank] += prod(block.sizes) * dtype.itemsize
        piece_name = f"{name}@{','.join(map(str, block.offsets))}"
        pieces.append(TensorPiece(block.offsets, block.sizes, rank_file(rank), piece_name))
    return TensorEntry(dtype, shape, tuple(pieces))


def _fill(blocks: Collection[Block], whole: Block) -> bool:
    """True if the blocks have the volume of the whole, and no corners but its own and pairs inside: they tile it."""
    return sum(prod(block.sizes) for block in blocks) == prod(whole.shape) and _corners(blocks) == _corners([whole])


def _corners(blocks: Collection[Block]) -> set[tuple[int, ...]]:
    """Corners of an odd number of blocks."""
    corners: set[tuple[int, ...]] = set()
    for block in blocks:
        for corner in product(*[(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True)]):
            corners ^= {corner}
    return corners
