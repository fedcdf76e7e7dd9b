"""Reads a checkpoint, or the parts that a rank needs, and verifies every byte; nothing is executed.

A chunk of a tensor is compared with its checksum when a rank reads from it; `verify` compares the other chunks.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.folders import STATE, TABLE, locate
from evenstep.checkpoint.manifest import Manifest, UnreadableError, check_structure, damaged, read_json
from evenstep.checkpoint.ranks import ALONE, RankGroup, together
from evenstep.checkpoint.shard import TensorEntry, TensorPiece, parse_table
from evenstep.checkpoint.state import JSON, unpack
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, SUFFIX, TensorFile
from evenstep.errors import CheckpointError

THREADS = 4  # that read tensors at once


@final
class CheckpointReader:
    """Reader of a checkpoint; each rank reads the parts that it needs.

    Args:
        path: a step folder, a folder of checkpoints or a run folder, whose newest complete one is read.

    Attributes:
        path: the step folder.
        manifest: description of the checkpoint.
        tensors: entry of each tensor by `PART/TENSOR`.
        values: content of `state.json`: by part, all values that are no tensors.
        state: after `load`, as it was given to `write_checkpoint`; use it only after `verify` has returned.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = locate(Path(path))
        self.manifest: Manifest = check_structure(self.path)
        self.values: dict[str, JSON] = read_json(self.path, STATE, self.manifest)
        self.tensors: dict[str, TensorEntry] = parse_table(read_json(self.path, TABLE, self.manifest))
        self.state: dict[str, Any] = {}
        self._files: dict[str, TensorFile] = {}
        self._opening = Lock()
        self._outlines: dict[int, tuple[str, Tensor]] = {}  # by `id`, which is unique as long as the outline is held
        self._compared: dict[tuple[str, str], set[int]] = {}  # numbers of chunks, by file and name

    @property
    def update(self) -> int:
        """Number of committed updates in the state."""
        return self.manifest.update

    def load(self, is_outlined: Callable[[str], bool] | None = None) -> None:
        """Read the state; UnreadableError for a damaged file.

        Args:
            is_outlined: True for a tensor `PART/TENSOR` in whose place to put an outline: a tensor on the meta device,
                whose values `read` gives. None reads all tensors.
        """
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in self.values}

        def given(name: str) -> Tensor:
            if is_outlined is None or not is_outlined(name):
                return self.tensor(name)
            entry = self.tensors[name]
            outline = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            self._outlines[id(outline)] = name, outline
            return outline

        try:
            with ThreadPoolExecutor(THREADS) as pool:  # neither checksums nor copies hold the interpreter's lock
                for name, tensor in zip(self.tensors, pool.map(given, self.tensors), strict=True):
                    part, _, inner = name.partition("/")
                    tensors[part][inner] = tensor
            self.state = {part: unpack(values, tensors[part]) for part, values in self.values.items()}
        except KeyError as error:
            raise UnreadableError(f"`{self.path}` lacks {error.args[0]!r}; it is damaged.") from error

    def read(self, outline: Tensor, *, like: Tensor | None = None) -> Tensor:
        """Values of an outline, on the CPU: whole, or the block of a DTensor `like`."""
        from torch.distributed.tensor import DTensor

        name, _ = self._outlines[id(outline)]
        if not isinstance(like, DTensor) or like.shape != outline.shape:
            return self.tensor(name)
        (chunk,) = cast("Any", like).__create_chunk_list__()
        local = self.tensor(name, tuple(chunk.offsets), tuple(chunk.sizes)).to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def tensor(self, name: str, offsets: Sequence[int] = (), sizes: Sequence[int] | None = None) -> Tensor:
        """A block of the tensor `PART/TENSOR`, or the whole tensor, in new memory of the CPU."""
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"`{self.path}` holds no tensor `{name}`; `CheckpointReader.tensors` has all names.")
        if sizes is None:
            offsets = (0,) * len(entry.shape)
            sizes = entry.shape
        if any(at < 0 or at + size > whole for at, size, whole in zip(offsets, sizes, entry.shape, strict=True)):
            raise CheckpointError(
                f"the block {list(sizes)} at {list(offsets)} must lie in the shape {list(entry.shape)} of `{name}`."
            )
        if len(entry.pieces) == 1 and tuple(sizes) == entry.shape == entry.pieces[0].sizes:
            return self._rows(entry.pieces[0], 0, entry.shape[0] if entry.shape else 1)
        block = torch.empty(tuple(sizes), dtype=entry.dtype)
        for piece in entry.pieces:
            pairs = zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)
            common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in pairs]
            if any(begin >= end for begin, end in common):
                continue
            first, last = common[0]
            source = self._rows(piece, first - piece.offsets[0], last - piece.offsets[0])
            target = block.narrow(0, first - offsets[0], last - first)
            for dim, (begin, end) in enumerate(common[1:], start=1):
                source = source.narrow(dim, begin - piece.offsets[dim], end - begin)
                target = target.narrow(dim, begin - offsets[dim], end - begin)
            target.copy_(source)
        return block

    def verify(self, group: RankGroup = ALONE) -> None:
        """Compare all bytes with their checksums; ranks share the chunks that none has read, and the error of one."""
        compared: dict[tuple[str, str], set[int]] = {}
        for each in group.gather(self._compared):
            for place, numbers in each.items():
                compared.setdefault(place, set()).update(numbers)
        pieces = [piece for entry in self.tensors.values() for piece in entry.pieces]
        left = [(piece, {*range(len(piece.crc32))} - compared.get((piece.file, piece.name), set())) for piece in pieces]
        left = [(piece, numbers) for piece, numbers in left if numbers]
        names = sorted(name for name in self.manifest.files if name.endswith(SUFFIX))

        def compare() -> None:
            for name in names[group.rank :: group.ranks]:
                if self._file(name).header_crc32() != self.manifest.files[name].crc32:
                    raise damaged(self.path / name)
            for piece, numbers in left[group.rank :: group.ranks]:
                self._compare(piece, numbers)

        together(group, compare)

    def _rows(self, piece: TensorPiece, begin: int, end: int) -> Tensor:
        file = self._file(piece.file)
        row_bytes = math.prod(piece.sizes[1:]) * file.stored[piece.name].itemsize
        compared = self._compared.setdefault((piece.file, piece.name), set())
        numbers = {*range(begin * row_bytes // CHUNK_BYTES, -(-end * row_bytes // CHUNK_BYTES))}
        self._compare(piece, numbers - compared)
        compared |= numbers
        return file.rows(piece.name, begin, end)

    def _compare(self, piece: TensorPiece, numbers: set[int]) -> None:
        if not self._file(piece.file).is_sound(piece.name, numbers, piece.crc32):
            raise damaged(self.path / piece.file)

    def _file(self, name: str) -> TensorFile:
        with self._opening:
            if name not in self._files:
                self._files[name] = self._opened(name)
            return self._files[name]

    def _opened(self, name: str) -> TensorFile:
        file = TensorFile(self.path / name)
        stored = {
            inner: (one.dtype, tuple(one.shape), -(-one.nbytes // CHUNK_BYTES)) for inner, one in file.stored.items()
        }
        listed = {
            piece.name: (entry.dtype, piece.sizes, len(piece.crc32))
            for entry in self.tensors.values()
            for piece in entry.pieces
            if piece.file == name
        }
        if stored != listed:
            raise UnreadableError(f"`{file.path}` has other tensors than `{TABLE}` lists; it is damaged.")
        return file


def verify(path: Path | str) -> Manifest:
    """Read every byte of the checkpoint at `path` and compare it with its checksum; gives the manifest."""
    reader = CheckpointReader(path)
    reader.verify()
    return reader.manifest


def read_checkpoint(path: Path | str) -> CheckpointReader:
    """The checkpoint at `path`, or the newest complete one of the run there, whole and verified, by one process.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     read_checkpoint(run).state
    {'model': {'bias': tensor([1., 1.])}}
    """
    reader = CheckpointReader(path)
    reader.load()
    reader.verify()
    return reader
