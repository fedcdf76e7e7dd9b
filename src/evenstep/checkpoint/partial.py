"""Reads of a checkpoint what this rank needs, and verifies every byte of it together with the other ranks.

The state comes with *outlines*, tensors without values on the meta device, in the place of the tensors that may be cut
over ranks. Whoever restores them asks for an outline's values, whole or the block that a live tensor holds, and only
those bytes are read. The checksum of each range of bytes is taken as it is read; `verify` joins those of all ranks to
the checksum of each file, and what nobody needed is read then by one rank. It changes nothing that is live.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast, final
from zlib import crc32

import torch
from torch import Tensor

from evenstep.checkpoint.crc import joined_crc32
from evenstep.checkpoint.layout import STATE, TENSORS_SUFFIX, locate
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.ranks import Ranks, together
from evenstep.checkpoint.reader import parse_values, read_table, unpacked
from evenstep.checkpoint.sharding import Piece, Stored, Table
from evenstep.checkpoint.tensorfile import CHUNK_BYTES, bytes_of
from evenstep.checkpoint.verify import check_structure, checked_file
from evenstep.errors import CheckpointError


class ReadRange(NamedTuple):
    """Bytes of a file that were read.

    Args:
        file: its name in the checkpoint.
        begin: the first byte.
        end: the one after the last.
        crc32: the checksum of what was read.
    """

    file: str
    begin: int
    end: int
    crc32: int


@final
class PartialCheckpoint:
    """A checkpoint of which each rank reads what it needs.

    Args:
        path: a step folder, a folder of checkpoints or a run folder.
        outlined: says of a tensor, by `PART/NAME`, whether only its outline is in `state`.

    Attributes:
        path: the step folder.
        state: as it was saved, with tensors on the CPU and outlines; read `verify`'s promise before it is used.

    Raises:
        CheckpointError: no checkpoint there, or one whose files are not what the manifest says.
    """

    def __init__(self, path: Path | str, outlined: Callable[[str], bool]) -> None:
        self.path = locate(Path(path))
        self._manifest: Manifest = check_structure(self.path)
        self._table: Table = read_table(self.path, self._manifest)
        self._ranges: list[ReadRange] = []
        self._outlines: dict[int, tuple[str, Tensor]] = {}  # by `id`; holding the outline keeps the number its own
        with checked_file(self.path / STATE, self._manifest.files[STATE]) as file:
            values = parse_values(file.read(file.size))
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, stored in self._table.items():
            part, _, inner = name.partition("/")
            # bytes may be those of a dtype that files do not name, which is only known to the values
            is_outline = outlined(name) and stored.dtype != torch.uint8
            tensors.setdefault(part, {})[inner] = self._outline(name, stored) if is_outline else self._block(name)
        self.state = cast("dict[str, Any]", unpacked(self.path, values, tensors))

    def read(self, outline: Tensor, *, like: Tensor | None = None) -> Tensor:
        """The values of an outline, on the CPU: whole, or the block of them that `like` holds, cut as it is.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        from torch.distributed.tensor import DTensor

        name, _ = self._outlines[id(outline)]
        if not isinstance(like, DTensor) or like.shape != outline.shape:
            return self._block(name)
        ((offsets, sizes),) = [(chunk.offsets, chunk.sizes) for chunk in cast("Any", like).__create_chunk_list__()]
        local = self._block(name, tuple(offsets), tuple(sizes)).to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def verify(self, group: Ranks) -> None:
        """Compare the checksums of all files with what was written; all ranks call it when each has read its part.

        Raises:
            CheckpointError: on all ranks, if any has read a byte that was not written so. What was read must not be
                used then.
        """
        ranges = [one for each in group.gather(self._ranges) for one in each]
        files = sorted(name for name in self._manifest.files if name.endswith(TENSORS_SUFFIX))
        gaps = [gap for file in files for gap in _side_by_side(file, self._manifest.files[file].bytes, ranges)[1]]
        mine = gaps[group.rank :: group.ranks]
        for read in together(group, lambda: [self._skim(*gap) for gap in mine]):
            ranges += read
        together(group, lambda: self._compare(files[group.rank :: group.ranks], ranges))

    def _outline(self, name: str, stored: Stored) -> Tensor:
        outline = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        self._outlines[id(outline)] = name, outline
        return outline

    def _block(self, name: str, offsets: Sequence[int] = (), sizes: Sequence[int] | None = None) -> Tensor:
        """The block of a tensor at `offsets`, or all of it, in memory of its own."""
        stored = self._table[name]
        sizes, offsets = (stored.shape, (0,) * len(stored.shape)) if sizes is None else (sizes, offsets)
        if len(stored.pieces) == 1 and tuple(sizes) == stored.shape == stored.pieces[0].sizes:
            return self._rows(stored.pieces[0], stored.dtype, 0, stored.shape[0] if stored.shape else 1)
        block = torch.empty(tuple(sizes), dtype=stored.dtype)
        for piece in stored.pieces:
            pairs = zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)
            common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in pairs]
            if any(begin >= end for begin, end in common):
                continue
            rows = common[0][0] - piece.offsets[0], common[0][1] - piece.offsets[0]
            source, target = self._rows(piece, stored.dtype, *rows), block
            for dim, (begin, end) in enumerate(common):
                target = target.narrow(dim, begin - offsets[dim], end - begin)
                if dim:  # of the first dimension no more was read than needed
                    source = source.narrow(dim, begin - piece.offsets[dim], end - begin)
            target.copy_(source)
        return block

    def _rows(self, piece: Piece, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` of a piece, counted from its first; a piece without dimensions is one row."""
        rows = torch.empty((end - begin, *piece.sizes[1:]) if piece.sizes else (), dtype=dtype)
        if rows.numel():
            size = rows.numel() * dtype.itemsize // (end - begin)
            first, last = piece.begin + begin * size, piece.begin + end * size
            checksum = self._fill(bytes_of(rows), piece.file, first)
            self._ranges.append(ReadRange(piece.file, first, last, checksum))
        return rows

    def _fill(self, buffer: memoryview, file: str, begin: int) -> int:
        """Read into all of `buffer` from `begin` on; gives the checksum of what was read."""
        checksum, at = 0, 0
        try:
            with FileIO(self.path / file, "rb") as raw:
                while at < len(buffer):
                    count = os.preadv(raw.fileno(), [buffer[at : at + CHUNK_BYTES]], begin + at)
                    if not count:
                        raise CheckpointError(f"`{self.path / file}` ended while it was read; it is damaged.")
                    checksum = crc32(buffer[at : at + count], checksum)
                    at += count
        except OSError as error:
            raise CheckpointError(f"`{self.path / file}` cannot be read: {error.strerror}.") from error
        return checksum

    def _skim(self, file: str, begin: int, end: int) -> ReadRange:
        """Read bytes that no rank needs, for their checksum."""
        checksum = self._fill(memoryview(bytearray(end - begin)), file, begin)
        return ReadRange(file, begin, end, checksum)

    def _compare(self, files: Sequence[str], ranges: Sequence[ReadRange]) -> None:
        """Raise CheckpointError unless these files are as they were written, on every rank that has read of them."""
        for file in files:
            entry = self._manifest.files[file]
            seen: dict[tuple[int, int], int] = {}
            differ = any(seen.setdefault((r.begin, r.end), r.crc32) != r.crc32 for r in ranges if r.file == file)
            checksum = 0
            for one in _side_by_side(file, entry.bytes, ranges)[0]:
                checksum = joined_crc32(checksum, one.crc32, one.end - one.begin)
            if differ or f"{checksum:08x}" != entry.crc32:
                found = "not the same on all ranks" if differ else f"{checksum:08x}"
                raise CheckpointError(
                    f"`{self.path / file}` is damaged: its checksum is {found}, but {entry.crc32} was written; take an "
                    f"older checkpoint."
                )


def _side_by_side(
    file: str, size: int, ranges: Iterable[ReadRange]
) -> tuple[list[ReadRange], list[tuple[str, int, int]]]:
    """Ranges of a file that follow each other without overlap, and the gaps between them.

    >>> read = [ReadRange("a", 4, 9, 1), ReadRange("a", 2, 4, 2), ReadRange("a", 2, 4, 2)]
    >>> chosen, gaps = _side_by_side("a", 10, read)
    >>> [one.begin for one in chosen], gaps
    ([2, 4], [('a', 0, 2), ('a', 9, 10)])
    """
    chosen: list[ReadRange] = []
    gaps: list[tuple[str, int, int]] = []
    at = 0
    for one in sorted(one for one in ranges if one.file == file):
        if one.begin < at:
            continue  # read by another rank as well
        if one.begin > at:
            gaps.append((file, at, one.begin))
        chosen.append(one)
        at = one.end
    if at < size:
        gaps.append((file, at, size))
    return chosen, gaps
