"""The table of a checkpoint's tensors: of which kind each is, and which piece of it lies where.

    state.json                what is not a tensor, as in every checkpoint
    rank-00000.safetensors    the pieces that this rank wrote, each under the name `PART/TENSOR@OFFSETS`
    tensors.json              `PART/TENSOR` → dtype, shape, pieces: offsets, sizes, file, range of bytes

A table is believed only if its pieces lie inside their files, no two share a byte, and those of a tensor cover it
exactly. Where no tensor is cut over ranks there is no `tensors.json`: the headers of the files say the same.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.checkpoint.damage import BadFileError
from evenstep.checkpoint.state import DTYPE_NAMES

TABLE = "tensors.json"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorPiece(NamedTuple):
    """A block of a tensor in a file.

    Args:
        offsets, sizes: of the block in the tensor, one per dimension.
        begin, end: its bytes in the file, in row-major order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int


class TensorEntry(NamedTuple):
    """A tensor in a checkpoint: what it is, and where its pieces lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


Table = Mapping[str, TensorEntry]


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
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "pieces": [
                {"offsets": p.offsets, "sizes": p.sizes, "file": p.file, "bytes": [p.begin, p.end]}
                for p in entry.pieces
            ],
        }
        for name, entry in table.items()
    }
    return json.dumps(content, separators=(",", ":")).encode()


def parse_table(content: Mapping[str, Any]) -> Table:
    """Table in the content of `tensors.json`, as JSON gave it."""
    return {name: _parse_entry(entry) for name, entry in content.items()}


def _parse_entry(entry: Mapping[str, Any]) -> TensorEntry:
    pieces = [
        TensorPiece(tuple(piece["offsets"]), tuple(piece["sizes"]), piece["file"], *piece["bytes"])
        for piece in entry["pieces"]
    ]
    return TensorEntry(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]), pieces=tuple(pieces))


def check_cover(name: str, entry: TensorEntry) -> None:
    """Raise BadFileError unless the pieces of the tensor cover it, each element once."""
    pieces = sorted(entry.pieces, key=lambda piece: piece.offsets)
    for piece in pieces:
        if not is_inside(piece.offsets, piece.sizes, entry.shape):
            raise BadFileError(f"has a piece of tensor `{name}` at {list(piece.offsets)} that is not inside it")
    held = sum(math.prod(piece.sizes) for piece in pieces)
    if held != math.prod(entry.shape):
        raise BadFileError(f"has {held} of the {math.prod(entry.shape)} elements of tensor `{name}`")
    for number, one in enumerate(pieces):
        for other in pieces[number + 1 :]:
            if entry.shape and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # sorted by the first offset: all that follow begin behind as well
            if _overlap(one, other):
                raise BadFileError(f"has the element at {list(other.offsets)} of tensor `{name}` twice")


def _overlap(one: TensorPiece, other: TensorPiece) -> bool:
    return all(
        a < b + n and b < a + m for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
