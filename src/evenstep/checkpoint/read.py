"""Reads a checkpoint, or the parts that a rank needs, and verifies every byte; nothing is executed.

Each chunk of a tensor is compared with its checksum when a rank reads from it; `verify` compares the chunks that no
rank has read. Only `newest_checkpoint` falls back to an older checkpoint.
"""

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.folders import STATE, TABLE, checkpoints_folder, complete_checkpoints, locate
from evenstep.checkpoint.manifest import Manifest, UnreadableError, check_structure, damaged, read_json
from evenstep.checkpoint.ranks import ALONE, RankGroup, together
from evenstep.checkpoint.shard import TensorEntry, TensorPiece, is_inside, parse_table
from evenstep.checkpoint.state import JSON, unpack
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, SUFFIX, TensorFile
from evenstep.errors import CheckpointError


@final
class CheckpointReader:
    """One checkpoint, of which each rank reads the parts that it needs.

    Args:
        path: a step folder, a folder of checkpoints or a run folder, whose newest complete one is read.

    Attributes:
        path: the step folder.
        manifest: description of the checkpoint.
        tensors: entry of each tensor by `PART/TENSOR`.
        values: content of `state.json`: by part, all values that are no tensors.
        state: after `load`, as it was given to `write_checkpoint`; use it only after `verify` has returned.

    Raises:
        CheckpointError: no checkpoint there; an UnreadableError if its files are not those of the manifest.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = locate(Path(path))
        self.manifest: Manifest = check_structure(self.path)
        self.values: dict[str, JSON] = read_json(self.path, STATE, self.manifest)
        self.tensors: dict[str, TensorEntry] = parse_table(read_json(self.path, TABLE, self.manifest))
        self.state: dict[str, Any] = {}
        self._files: dict[str, TensorFile] = {}
        self._outlines: dict[int, tuple[str, Tensor]] = {}  # by `id`, which is unique as long as the outline is held
        self._compared: dict[tuple[str, str], set[int]] = {}  # numbers of chunks, by file and name
        self._damaged: set[str] = set()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="evenstep-checksum")  # while values are copied
        self._comparing: list[Future[None]] = []

    @property
    def update(self) -> int:
        """Number of committed updates in the state."""
        return self.manifest.update

    def load(self, is_outlined: Callable[[str], bool] | None = None, device: torch.device | str = "cpu") -> None:
        """Read the state.

        Args:
            is_outlined: True for a tensor `PART/TENSOR` in whose place to put an outline: a tensor on the meta device,
                whose values `read` gives. None reads all tensors.
            device: of the other tensors.

        Raises:
            UnreadableError: a file that can't be read, or values and tensors that do not belong together.
        """
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in self.values}
        for name, entry in self.tensors.items():
            part, _, inner = name.partition("/")
            if part not in tensors:
                raise UnreadableError(f"`{self.path}` holds `{name}`, which `{STATE}` lacks; it is damaged.")
            # uint8 may stand for a dtype that files do not name, which `state.json` tells
            if is_outlined is not None and entry.dtype != torch.uint8 and is_outlined(name):
                outline = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                self._outlines[id(outline)] = name, outline
                tensors[part][inner] = outline
            else:
                tensors[part][inner] = self.tensor(name).to(device)
        try:
            self.state = {part: unpack(values, tensors[part], part) for part, values in self.values.items()}
        except KeyError as error:
            raise UnreadableError(f"`{self.path}` lacks the tensor {error.args[0]!r}; it is damaged.") from error

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
        """A block of the tensor `PART/TENSOR`, or the whole tensor, in new memory of the CPU.

        Raises:
            CheckpointError: there is no such tensor, or no such block of it.
            UnreadableError: a file that cannot be read.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"`{self.path}` holds no tensor `{name}`; `CheckpointReader.tensors` has all names.")
        if sizes is None:
            offsets = (0,) * len(entry.shape)
            sizes = entry.shape
        if not is_inside(offsets, sizes, entry.shape):
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
        """Compare all bytes with their checksums; ranks share the chunks that none of them has read.

        Raises:
            UnreadableError: on all ranks, if any has found a byte that differs.
        """
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
                    self._damaged.add(name)
            for piece, numbers in left[group.rank :: group.ranks]:
                self._compare(piece, numbers)
            for job in self._comparing:
                job.result()
            for name in sorted(self._damaged):
                raise damaged(self.path / name)

        together(group, compare)

    def _rows(self, piece: TensorPiece, begin: int, end: int) -> Tensor:
        file = self._file(piece.file)
        row_bytes = math.prod(piece.sizes[1:]) * file.stored[piece.name].itemsize
        compared = self._compared.setdefault((piece.file, piece.name), set())
        new = {*range(begin * row_bytes // CHUNK_BYTES, -(-end * row_bytes // CHUNK_BYTES))} - compared
        if new:
            compared |= new
            self._comparing.append(self._hashing.submit(self._compare, piece, new))
        return file.rows(piece.name, begin, end)

    def _compare(self, piece: TensorPiece, numbers: Collection[int]) -> None:
        if not self._file(piece.file).is_sound(piece.name, sorted(numbers), piece.crc32):
            self._damaged.add(piece.file)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            file = TensorFile(self.path / name)
            stored = {
                inner: (one.dtype, tuple(one.shape), -(-one.nbytes // CHUNK_BYTES))
                for inner, one in file.stored.items()
            }
            listed = {
                piece.name: (entry.dtype, piece.sizes, len(piece.crc32))
                for entry in self.tensors.values()
                for piece in entry.pieces
                if piece.file == name
            }
            if stored != listed:
                raise UnreadableError(f"`{file.path}` has other tensors than `{TABLE}` lists; it is damaged.")
            self._files[name] = file
        return self._files[name]


def verify(path: Path | str) -> Manifest:
    """Read every byte of the checkpoint at `path` and compare it with its checksum; gives the manifest.

    Raises:
        CheckpointError: for the first fault, with the file's name.
    """
    reader = CheckpointReader(path)
    reader.verify()
    return reader.manifest


def read_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> CheckpointReader:
    """The checkpoint at `path`, or the newest complete one of the run there, whole and verified, by one process.

    Args:
        path: a step folder, a folder of checkpoints or a run folder.
        device: of the tensors.

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
    reader.load(device=device)
    reader.verify()
    return reader


def newest_checkpoint(folder: Path | str) -> tuple[CheckpointReader | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be read, and the newer ones that cannot, each with the reason.

    Args:
        folder: a folder of checkpoints or a run folder; need not exist.

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
