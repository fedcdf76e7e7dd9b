"""Reads a checkpoint, all of it or what a rank needs, verifying every byte and executing none.

Of each range of bytes the checksum is taken as it is read. `verify` joins those of all ranks to the checksum of each
file, after what nobody has needed was read as well. Whoever names a checkpoint gets that one or an error; only
`newest_checkpoint` falls back to an older one. What the state is for is not known here.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.checksum import AHEAD_PIECES, Checksum, joined_crc32
from evenstep.checkpoint.damage import BadFileError, UnreadableError, named_errors
from evenstep.checkpoint.folders import STATE, TENSORS_SUFFIX, checkpoints_folder, complete_checkpoints, locate
from evenstep.checkpoint.integrity import check_checksum, check_structure, read_json
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.ranks import ALONE, RankGroup, together
from evenstep.checkpoint.state import JSON, unpack
from evenstep.checkpoint.table import TABLE, Table, TensorEntry, TensorPiece, is_inside, parse_table
from evenstep.checkpoint.tensorfile import CHUNK_BYTES, bytes_of, read_header
from evenstep.errors import CheckpointError


class ReadRange(NamedTuple):
    """Bytes `begin` to `end` of the file `file`, and the checksum of what was read there."""

    file: str
    begin: int
    end: int
    crc32: int


@final
class CheckpointReader:
    """One checkpoint, of which each rank reads what it needs.

    Args:
        path: a step folder, a folder of checkpoints or a run folder, whose newest complete one is meant.

    Attributes:
        path: the step folder.
        manifest: what the checkpoint says of itself.
        tensors: by `PART/TENSOR`: what each is, and where it lies.
        values: by part, what is not a tensor, as `state.json` has it.
        state: as it was given to `write_checkpoint`, once `load` was called; nothing of it is to be used before
            `verify` has returned.

    Raises:
        CheckpointError: no checkpoint there; an UnreadableError if its files are not what the manifest says.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = locate(Path(path))
        self.manifest: Manifest = check_structure(self.path)
        self.values: dict[str, JSON] = read_json(self.path / STATE, self.manifest.files[STATE])
        self.tensors: Table = _table(self.path, self.manifest)
        self.state: dict[str, Any] = {}
        self._ranges: list[ReadRange] = []
        self._outlines: dict[int, tuple[str, Tensor]] = {}  # by `id`; holding the outline keeps the number its own

    @property
    def update(self) -> int:
        """The number of committed updates in the state."""
        return self.manifest.update

    def load(self, is_outlined: Callable[[str], bool] | None = None, device: torch.device | str = "cpu") -> None:
        """Read the state.

        Args:
            is_outlined: says of a tensor, by `PART/TENSOR`, whether its place is taken by an outline, a tensor without
                values on the meta device, whose values are left to `read`; None reads all tensors.
            device: where the others go.

        Raises:
            UnreadableError: a file that can't be read, or values and tensors that do not belong together.
        """
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in self.values}
        for name, entry in self.tensors.items():
            part, _, inner = name.partition("/")
            if part not in tensors:
                raise UnreadableError(f"`{self.path}` holds `{name}`, which `{STATE}` lacks; it is damaged.")
            # bytes may be those of a dtype that files do not name, which is only known to the values
            if is_outlined is not None and entry.dtype != torch.uint8 and is_outlined(name):
                tensors[part][inner] = outline = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                self._outlines[id(outline)] = name, outline
            else:
                tensors[part][inner] = self.tensor(name).to(device)
        try:
            self.state = {part: unpack(values, tensors[part], part) for part, values in self.values.items()}
        except KeyError as error:
            raise UnreadableError(f"`{self.path}` lacks the tensor {error.args[0]!r}; it is damaged.") from error

    def read(self, outline: Tensor, *, like: Tensor | None = None) -> Tensor:
        """The values of an outline, on the CPU: whole, or the block of them that `like` holds, cut as it is.

        Raises:
            UnreadableError: a file that cannot be read.
        """
        from torch.distributed.tensor import DTensor

        name, _ = self._outlines[id(outline)]
        if not isinstance(like, DTensor) or like.shape != outline.shape:
            return self.tensor(name)
        ((offsets, sizes),) = [(chunk.offsets, chunk.sizes) for chunk in cast("Any", like).__create_chunk_list__()]
        local = self.tensor(name, tuple(offsets), tuple(sizes)).to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def tensor(self, name: str, offsets: Sequence[int] = (), sizes: Sequence[int] | None = None) -> Tensor:
        """The block of the tensor `PART/TENSOR` at `offsets`, or all of it, on the CPU in memory of its own.

        Raises:
            CheckpointError: there is no such tensor, or no such block of it; an UnreadableError for a file that cannot
                be read.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"`{self.path}` holds no tensor `{name}`; `CheckpointReader.tensors` has all names.")
        sizes, offsets = (entry.shape, (0,) * len(entry.shape)) if sizes is None else (sizes, offsets)
        if not is_inside(offsets, sizes, entry.shape):
            raise CheckpointError(
                f"the block {list(sizes)} at {list(offsets)} must lie in the shape {list(entry.shape)} of `{name}`."
            )
        if len(entry.pieces) == 1 and tuple(sizes) == entry.shape == entry.pieces[0].sizes:
            return self._rows(entry.pieces[0], entry.dtype, 0, entry.shape[0] if entry.shape else 1)
        block = torch.empty(tuple(sizes), dtype=entry.dtype)
        for piece in entry.pieces:
            pairs = zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)
            common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in pairs]
            if any(begin >= end for begin, end in common):
                continue
            rows = common[0][0] - piece.offsets[0], common[0][1] - piece.offsets[0]
            source, target = self._rows(piece, entry.dtype, *rows), block
            for dim, (begin, end) in enumerate(common):
                target = target.narrow(dim, begin - offsets[dim], end - begin)
                if dim:  # of the first dimension no more was read than needed
                    source = source.narrow(dim, begin - piece.offsets[dim], end - begin)
            target.copy_(source)
        return block

    def verify(self, group: RankGroup = ALONE) -> None:
        """Compare the checksums of all files with what was written; what no rank has read is read for that.

        Raises:
            UnreadableError: on all ranks, if any has read a byte that was not written so.
        """
        ranges = [one for each in group.gather(self._ranges) for one in each]
        files = sorted(name for name in self.manifest.files if name.endswith(TENSORS_SUFFIX))
        gaps = [gap for file in files for gap in _side_by_side(file, self.manifest.files[file].bytes, ranges)[1]]
        mine = gaps[group.rank :: group.ranks]
        for read in together(group, lambda: [self._skim(*gap) for gap in mine]):
            ranges += read
        together(group, lambda: self._compare(files[group.rank :: group.ranks], ranges))

    def _rows(self, piece: TensorPiece, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        rows = torch.empty((end - begin, *piece.sizes[1:]) if piece.sizes else (), dtype=dtype)
        if rows.numel():
            size = rows.numel() * dtype.itemsize // (end - begin)
            whole = bytes_of(rows)
            chunks = (whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES))
            self._ranges.append(self._fill(chunks, piece.file, piece.begin + begin * size))
        return rows

    def _skim(self, file: str, begin: int, end: int) -> ReadRange:
        buffers = deque(memoryview(bytearray(min(CHUNK_BYTES, end - begin))) for _ in range(AHEAD_PIECES + 1))

        def reused() -> Iterator[memoryview]:
            for at in range(begin, end, CHUNK_BYTES):
                buffers.rotate()  # the others are hashed while one is filled
                yield buffers[0][: end - at]

        return self._fill(reused(), file, begin)

    def _fill(self, buffers: Iterable[memoryview], name: str, begin: int) -> ReadRange:
        path, end = self.path / name, begin
        with named_errors(path), FileIO(path) as file, Checksum() as checksum:
            for buffer in buffers:
                rest = buffer
                while rest:
                    count = os.preadv(file.fileno(), [rest], end)
                    if not count:
                        raise BadFileError("ended while it was read")
                    rest, end = rest[count:], end + count
                checksum.add(buffer)
            return ReadRange(name, begin, end, checksum.value())

    def _compare(self, files: Sequence[str], ranges: Sequence[ReadRange]) -> None:
        for file in files:
            entry = self.manifest.files[file]
            seen: dict[tuple[int, int], int] = {}
            differ = any(seen.setdefault((r.begin, r.end), r.crc32) != r.crc32 for r in ranges if r.file == file)
            checksum = 0
            for one in _side_by_side(file, entry.bytes, ranges)[0]:
                checksum = joined_crc32(checksum, one.crc32, one.end - one.begin)
            check_checksum(self.path / file, "not the same on all ranks" if differ else f"{checksum:08x}", entry)


def _table(step: Path, manifest: Manifest) -> Table:
    if TABLE in manifest.files:
        content = read_json(step / TABLE, manifest.files[TABLE])
        return parse_table(content)
    table: dict[str, TensorEntry] = {}
    for name in manifest.files:
        if name.endswith(TENSORS_SUFFIX):
            with named_errors(step / name):
                part = name.removesuffix(TENSORS_SUFFIX)
                table |= {f"{part}/{tensor}": entry for tensor, entry in read_header(step / name).items()}
    return table


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


def verify(path: Path | str) -> Manifest:
    """Read every byte of the checkpoint at `path` and compare it with the manifest.

    Raises:
        CheckpointError: the first thing that is wrong, with the file's name.
    """
    reader = CheckpointReader(path)
    reader.verify()
    return reader.manifest


def read_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> CheckpointReader:
    """The checkpoint at `path`, or the newest complete one of the run there, whole and verified, by one process.

    Args:
        path: a step folder, a folder of checkpoints or a run folder.
        device: where the tensors go.

    Raises:
        CheckpointError: no checkpoint there (the message lists what is), or one that is damaged or foreign.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     read_checkpoint(run).state
    {'model': {'bias': tensor([1., 1.])}}
    """
    reader = CheckpointReader(path)
    try:
        reader.load(device=device)
    except CheckpointError:
        reader.verify()  # if a file is damaged, that is the better message
        raise
    reader.verify()
    return reader


def newest_checkpoint(folder: Path | str) -> tuple[CheckpointReader | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be read, and the newer ones that cannot, each with the reason.

    Args:
        folder: a folder of checkpoints or a run folder; need not exist.

    Raises:
        CheckpointError: a folder that cannot be listed.

    >>> newest_checkpoint("runs/none")
    (None, [])
    """
    rejected: list[tuple[Path, str]] = []
    for path in reversed(complete_checkpoints(checkpoints_folder(Path(folder)))):
        try:
            return read_checkpoint(path), rejected
        except CheckpointError as error:
            rejected.append((path, str(error)))
    return None, rejected
