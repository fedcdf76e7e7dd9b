"""One checkpoint on its way to the disk, in steps that may run at different times and in different threads.

    Save(…)      all ranks together: what is saved, and which rank writes which bytes of it
    write()      each rank alone, in any thread: its own files, synced
    publish()    the first rank, once all have written: the manifest, then the folder's name
    abandon()    the first rank, if any of that failed

A state whose tensors are whole is written by the first rank, one file per part; one with tensors that are cut over
ranks by all of them, a file each. Who waits for whom, and in which thread, is decided by `writer` and `background`.
"""

import errno
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from zlib import crc32

from evenstep.checkpoint.checksum import Checksum
from evenstep.checkpoint.layout import LATEST, LATEST_SAVING, REPLACED, SAVING, STATE, TENSORS_SUFFIX, step_name
from evenstep.checkpoint.leaves import Leaves
from evenstep.checkpoint.manifest import MANIFEST, FileEntry, manifest_bytes, new_manifest
from evenstep.checkpoint.ranks import ALONE, Ranks, together
from evenstep.checkpoint.retention import discard, settle_replaced
from evenstep.checkpoint.sharding import TABLE, Piece, Stored, piece_key, table_bytes
from evenstep.checkpoint.state import JSON
from evenstep.checkpoint.storage import LOCAL_DISK, Disk
from evenstep.checkpoint.tensorfile import TensorFile
from evenstep.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one rank has written: its files, and of each piece in them the file and the range of bytes."""

    files: Mapping[str, FileEntry]
    places: Mapping[str, tuple[str, int, int]]


@final
class Save:
    """A checkpoint that is being saved; made by all ranks of `group` at once.

    Args:
        folder, update, state, group, disk, resumed_from: as for `write_checkpoint`.
        name: of the folder of something that is not a step of the run; `latest` then does not name it.

    Raises:
        CheckpointError: a state that cannot be saved, on any rank, or a disk that does not take a new folder.
    """

    def __init__(
        self,
        folder: Path,
        update: int,
        state: Mapping[str, object],
        *,
        group: Ranks = ALONE,
        disk: Disk = LOCAL_DISK,
        resumed_from: str | None = None,
        name: str = "",
    ) -> None:
        self.update = update
        self.target = folder / (name or step_name(update))
        self._is_step = not name
        self._staging = folder / f"{SAVING}{self.target.name}"
        self._group, self._disk, self._resumed_from = group, disk, resumed_from
        self._first = group.rank == 0
        self._files: dict[str, TensorFile] = {}
        self._stored: dict[str, Stored] = {}
        try:
            self._encoded = json.dumps(self._plan(state), separators=(",", ":")).encode()
        except BaseException:
            self.abandon()
            raise
        self.num_bytes = len(self._encoded) + sum(file.size for file in self._files.values())

    @property
    def is_shared(self) -> bool:
        """Whether several ranks write it."""
        return bool(self._stored)

    def files(self) -> list[TensorFile]:
        """What this rank writes of tensors."""
        return list(self._files.values())

    def write(self) -> Receipt:
        """Write and sync this rank's files.

        Raises:
            CheckpointError: the disk does not take them.
        """
        files: dict[str, FileEntry] = {}
        places: dict[str, tuple[str, int, int]] = {}
        try:
            for name, file in self._files.items():
                files[name] = _write_file(self._staging / name, file.chunks(), self._disk)
                places |= {piece: (name, *ends) for piece, ends in file.ranges().items() if self._stored}
        except OSError as error:
            raise self._failed(error) from error
        return Receipt(files=files, places=places)

    def publish(self, receipts: Iterable[Receipt]) -> Path:
        """Write what binds all ranks' files together, and give the folder its name; does nothing on other ranks.

        Raises:
            CheckpointError: the disk does not take it; what is there then is complete or not there.
        """
        if not self._first:
            return self.target
        try:
            self._bind(list(receipts))
            self._rename()
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._finish()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of update {self.update} is complete in `{self.target}`, but what follows its writing "
                f"failed ({_cause(error)}), so it may not survive a loss of power or `{LATEST}` may name an older one. "
                f"{_advice(error)}"
            ) from error
        return self.target

    def abandon(self) -> str:
        """Remove what was begun; gives a sentence on what could not be, or ""."""
        try:
            if self._first and self._staging.exists():
                discard(self._staging, self._disk)
        except OSError as error:
            return f" `{self._staging}` could not be removed ({error.strerror}); the next save or resume does it."
        return ""

    def _plan(self, state: Mapping[str, object]) -> dict[str, JSON]:
        """Decide what this rank writes; the first rank makes the folder, before any other can write into it."""
        leaves = Leaves()

        def propose() -> tuple[bool, int, Any]:
            leaves.pack(state, alone=self._group.ranks == 1)
            plan = leaves.plan()
            if self._first:
                self._make_staging()
            return plan is None, crc32("\0".join(sorted(leaves.names())).encode()), plan

        told = together(self._group, propose)
        for rank, (is_whole, key, _) in enumerate(told):
            if is_whole != told[0][0] or (key != told[0][1] and not is_whole):
                raise CheckpointError(
                    f"the state of rank {rank} has other tensors, or others that are cut, than rank 0's; give all "
                    f"ranks the same tree, with a `Shard` that is empty where a rank holds nothing of a tensor."
                )
        if leaves.sharded:
            mine, self._stored = leaves.pieces(self._group.rank, [plan for _, _, plan in told])
            if mine:
                self._files[f"rank-{self._group.rank:05d}{TENSORS_SUFFIX}"] = TensorFile(mine)
        elif self._first:
            self._files = {f"{part}{TENSORS_SUFFIX}": TensorFile(each) for part, each in leaves.whole.items() if each}
        return leaves.skeletons

    def _make_staging(self) -> None:
        try:
            if self._staging.exists():
                discard(self._staging, self._disk)
            self._disk.make_folder(self._staging)
        except OSError as error:
            raise self._failed(error) from error

    def _bind(self, receipts: list[Receipt]) -> None:
        entries = {name: entry for receipt in receipts for name, entry in receipt.files.items()}
        if self._stored:
            places = {piece: place for receipt in receipts for piece, place in receipt.places.items()}
            table = {name: _placed(name, stored, places) for name, stored in self._stored.items()}
            entries[TABLE] = _write_file(self._staging / TABLE, [table_bytes(table)], self._disk)
        entries[STATE] = _write_file(self._staging / STATE, [self._encoded], self._disk)
        manifest = new_manifest(self.update, entries, ranks=self._group.ranks, resumed_from=self._resumed_from)
        _write_file(self._staging / MANIFEST, [manifest_bytes(manifest)], self._disk)
        self._disk.sync_folder(self._staging)

    def _rename(self) -> None:
        replaced = self.target.with_name(f"{REPLACED}{self.target.name}")
        if replaced.exists():
            settle_replaced(self.target, self._disk)
        if self.target.exists():
            self._disk.rename(self.target, replaced)
        try:
            self._disk.rename(self._staging, self.target)
        except BaseException:
            if replaced.exists() and not self.target.exists():
                self._disk.rename(replaced, self.target)
            raise

    def _finish(self) -> None:
        """Make the new name durable, drop what it replaced, and let `latest` hold it."""
        self._disk.sync_folder(self.target.parent)
        replaced = self.target.with_name(f"{REPLACED}{self.target.name}")
        if replaced.exists():
            discard(replaced, self._disk)
        if not self._is_step:
            return
        run = self.target.parent.parent
        pointer = run / LATEST_SAVING
        if pointer.exists():
            self._disk.remove(pointer)
        _write_file(pointer, [f"{self.target.name}\n".encode()], self._disk)
        self._disk.rename(pointer, run / LATEST)
        self._disk.sync_folder(run)

    def _failed(self, error: OSError) -> CheckpointError:
        size = f"It needs {self.num_bytes / 1e6:.1f} MB and " if self._files else ""
        return CheckpointError(
            f"the checkpoint of update {self.update} could not be written to `{self.target}`: {_cause(error)}. {size}"
            f"{_free(self.target.parent, self._disk)}; earlier checkpoints are untouched. {_advice(error)}"
        )


def _placed(name: str, stored: Stored, places: Mapping[str, tuple[str, int, int]]) -> Stored:
    """The tensor with the place of each of its pieces."""
    pieces: list[Piece] = []
    for piece in stored.pieces:
        file, begin, end = places[piece_key(name, piece.offsets)]
        pieces.append(Piece(offsets=piece.offsets, sizes=piece.sizes, file=file, begin=begin, end=end))
    return Stored(dtype=stored.dtype, shape=stored.shape, pieces=tuple(pieces))


def _write_file(path: Path, chunks: Iterable[bytes | memoryview], disk: Disk) -> FileEntry:
    num_bytes = 0
    file = disk.create(path)
    try:
        with Checksum() as checksum:
            for chunk in chunks:
                checksum.add(chunk)
                disk.write(file, chunk)
                num_bytes += len(chunk)
            disk.sync(file)
            return FileEntry(bytes=num_bytes, crc32=checksum.text())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        disk.close(file)


def _cause(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    place = f" at `{error.filename}`" if error.filename else ""
    return f"{error.strerror or error} ({code}){place}"


def _free(folder: Path, disk: Disk) -> str:
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        return f"{disk.free_bytes(existing) / 1e6:.1f} MB are free"
    except OSError as error:
        return f"how much is free cannot be told ({error.strerror})"


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, keep fewer checkpoints, or put the run on another disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return "Make that a folder that this user may write to, or put the run elsewhere."
    return "Look at the disk's health, or put the run on another one."
