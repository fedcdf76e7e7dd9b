"""Writes a checkpoint so that at every instant it is either complete or not there.

    CheckpointWrite(…)   all ranks together: what is saved, and which rank writes which bytes of it
    write()              each rank alone, in any thread: its files, synced, into `.saving-step-…`
    publish()            the first rank, once all have written: `manifest.json` with every file's size and checksum,
                         last; sync the folder, rename it to `step-…`, sync its parent, let `latest` say its name
    abandon()            the first rank, if any of that failed

A state whose tensors are whole is written by the first rank, one file per part; one with tensors that are cut over
ranks by all of them, a file each. A checkpoint of the same update is replaced, since after a rewind it would be of a
past that did not happen; it stays readable until the new one has its name. Nothing else is deleted here.
"""

import errno
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from socket import gethostname
from typing import Any, TypeAlias, final
from zlib import crc32

from evenstep.checkpoint import storage
from evenstep.checkpoint.checksum import Checksum
from evenstep.checkpoint.flat_state import FlatState
from evenstep.checkpoint.folders import LATEST, LATEST_SAVING, REPLACED, SAVING, STATE, TENSORS_SUFFIX, step_name
from evenstep.checkpoint.manifest import MANIFEST, FileEntry, manifest_bytes, new_manifest
from evenstep.checkpoint.ranks import ALONE, RankGroup, on_all_ranks, together
from evenstep.checkpoint.retention import discard, settle_replaced
from evenstep.checkpoint.state import JSON
from evenstep.checkpoint.table import TABLE, TensorEntry, TensorPiece, piece_key, table_bytes
from evenstep.checkpoint.tensorfile import TensorFile
from evenstep.errors import CheckpointError

Written: TypeAlias = tuple[Mapping[str, FileEntry], Mapping[str, tuple[str, int, int]]]
"""What one rank has written: its files, and of each piece of a tensor in them the file and the range of bytes."""


@final
class CheckpointWrite:
    """A checkpoint that is being saved; made by all ranks of `group` at once.

    Args:
        folder, update, state, group, resumed_from: as for `write_checkpoint`.
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
        group: RankGroup = ALONE,
        resumed_from: str | None = None,
        name: str = "",
    ) -> None:
        self.update = update
        self.target = folder / (name or step_name(update))
        self._is_step = not name
        self._staging = folder / f"{SAVING}{self.target.name}"
        self._group, self._resumed_from = group, resumed_from
        self._first = group.rank == 0
        self._files: dict[str, TensorFile] = {}
        self._entries: dict[str, TensorEntry] = {}
        try:
            self._encoded = json.dumps(self._plan(state), separators=(",", ":")).encode()
        except BaseException as error:
            self.abandon(error)
            raise
        self.num_bytes = len(self._encoded) + sum(file.size for file in self._files.values())

    @property
    def is_shared(self) -> bool:
        return bool(self._entries)

    def files(self) -> list[TensorFile]:
        return list(self._files.values())

    @property
    def written(self) -> list[str]:
        """The names of the files that this rank writes, without the manifest."""
        bound = [STATE, *([TABLE] if self._entries else [])] if self._first else []
        return [*self._files, *bound]

    def write(self) -> Written:
        """Write and sync this rank's files.

        Raises:
            CheckpointError: the disk does not take them.
        """
        files: dict[str, FileEntry] = {}
        places: dict[str, tuple[str, int, int]] = {}
        try:
            for name, file in self._files.items():
                files[name] = write_file(self._staging / name, file.chunks())
                places |= {piece: (name, *ends) for piece, ends in file.ranges.items() if self._entries}
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._first:
                raise CheckpointError(
                    f"rank {self._group.rank} has a part of the state to write, but `{self._staging}`, which rank 0 "
                    f"has made, is not there on {gethostname()}; put the run folder where all ranks see it."
                ) from error
            raise self._failed(error) from error
        return files, places

    def publish(self, results: Iterable[Written]) -> Path:
        """Write what binds all ranks' files together, and give the folder its name; does nothing on other ranks.

        Raises:
            CheckpointError: the disk does not take it; what is there then is complete or not there.
        """
        if not self._first:
            return self.target
        try:
            self._bind(list(results))
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

    def abandon(self, error: BaseException) -> None:
        try:
            if self._first and self._staging.exists():
                discard(self._staging)
        except OSError as left:
            error.add_note(
                f" `{self._staging}` could not be removed ({left.strerror}); the next save or resume does it."
            )

    def run(self) -> Path:
        """Write and publish at once, all ranks together; gives the folder.

        Raises:
            CheckpointError: on any rank; nothing is left half written.
        """
        try:
            results = together(self._group, self.write)
            return together(self._group, lambda: self.publish(results))[0]
        except BaseException as error:
            self.abandon(error)
            raise

    def _plan(self, state: Mapping[str, object]) -> dict[str, JSON]:
        flat, planner = on_all_ranks(self._group, lambda: self._begin(state))
        names = crc32("\0".join(sorted(flat.by_name())).encode())
        told = together(self._group, lambda: (names, planner and planner.create_local_plan()))
        for rank, (theirs, plan) in enumerate(told):
            is_whole, first_is_whole = plan is None, told[0][1] is None
            if is_whole != first_is_whole or (theirs != told[0][0] and not is_whole):
                raise CheckpointError(
                    f"the state of rank {rank} has other tensors, or others that are cut, than rank 0's; give all "
                    f"ranks the same tree, with a `Shard` that is empty where a rank holds nothing of a tensor."
                )
        if planner is not None:
            mine, self._entries = planner.pieces(self._group.rank, [plan for _, plan in told])
            if mine:
                self._files[f"rank-{self._group.rank:05d}{TENSORS_SUFFIX}"] = TensorFile(mine)
        elif self._first:
            self._files = {f"{part}{TENSORS_SUFFIX}": TensorFile(each) for part, each in flat.whole.items() if each}
        return flat.values

    def _begin(self, state: Mapping[str, object]) -> tuple[FlatState, Any]:
        flat, planner = FlatState.of(state, alone=self._group.ranks == 1), None
        if flat.sharded:
            from evenstep.checkpoint.planning import SavePlanner

            planner = SavePlanner(flat.by_name())
        try:
            if self._first and self._staging.exists():
                discard(self._staging)
            if self._first:
                storage.make_folder(self._staging)
        except OSError as error:
            raise self._failed(error) from error
        return flat, planner

    def _bind(self, results: list[Written]) -> None:
        entries = {name: entry for files, _ in results for name, entry in files.items()}
        if self._entries:
            places = {piece: place for _, placed in results for piece, place in placed.items()}
            table = {name: _placed(name, entry, places) for name, entry in self._entries.items()}
            entries[TABLE] = write_file(self._staging / TABLE, [table_bytes(table)])
        entries[STATE] = write_file(self._staging / STATE, [self._encoded])
        manifest = new_manifest(self.update, entries, ranks=self._group.ranks, resumed_from=self._resumed_from)
        write_file(self._staging / MANIFEST, [manifest_bytes(manifest)])
        storage.sync_folder(self._staging)

    def _rename(self) -> None:
        replaced = self.target.with_name(f"{REPLACED}{self.target.name}")
        if replaced.exists():
            settle_replaced(self.target)
        if self.target.exists():
            storage.rename(self.target, replaced)
        try:
            storage.rename(self._staging, self.target)
        except BaseException:
            if replaced.exists() and not self.target.exists():
                storage.rename(replaced, self.target)
            raise

    def _finish(self) -> None:
        storage.sync_folder(self.target.parent)
        replaced = self.target.with_name(f"{REPLACED}{self.target.name}")
        if replaced.exists():
            discard(replaced)
        if not self._is_step:
            return
        run = self.target.parent.parent
        pointer = run / LATEST_SAVING
        if pointer.exists():
            storage.remove(pointer)
        write_file(pointer, [f"{self.target.name}\n".encode()])
        storage.rename(pointer, run / LATEST)
        storage.sync_folder(run)

    def _failed(self, error: OSError) -> CheckpointError:
        size = f"It needs {_size(self.num_bytes)} and " if self._files else ""
        return CheckpointError(
            f"the checkpoint of update {self.update} could not be written to `{self.target}`: {_cause(error)}. {size}"
            f"{_free(self.target.parent)}; earlier checkpoints are untouched. {_advice(error)}"
        )


def write_checkpoint(
    folder: Path | str,
    update: int,
    state: Mapping[str, object],
    *,
    group: RankGroup = ALONE,
    resumed_from: str | None = None,
) -> Path:
    """Write `state` as the checkpoint of `update`, and return its folder once it would survive a loss of power.

    If no tensor is cut over ranks, the first rank writes all: each top-level key of the state that holds tensors
    becomes `KEY.safetensors`, the tensors named by their path below the key; everything else goes to `state.json`. Of
    tied tensors in one file the first name is stored, as `safetensors.torch.load_model` expects. If some are cut
    (DTensors or `Shard`s), each rank writes `rank-NNNNN.safetensors`, and `tensors.json` says what lies where; what is
    whole on all ranks is spread over them.

    Args:
        folder: the folder of checkpoints, `RUN/checkpoints`, the same on all ranks; made if need be. `RUN/latest` is
            then set.
        update: number of committed updates in the state.
        state: a nested tree of dict, list, tuple, Tensor, str, int, float, bool and None; must not change meanwhile.
            All ranks give the same tree; of what is not a tensor, the first rank's is saved.
        group: the ranks, all of which call this.
        resumed_from: the checkpoint that the run went on from, for people.

    Raises:
        CheckpointError: a state that cannot be saved, or a disk that does not take it, on any rank; all ranks raise
            then, whatever was begun is removed, earlier checkpoints are as they were.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as run:
    ...     path = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     path.name, sorted(file.name for file in path.iterdir()), (Path(run) / "latest").read_text()
    ('step-00000010', ['manifest.json', 'model.safetensors', 'state.json'], 'step-00000010\\n')
    """
    return CheckpointWrite(Path(folder).expanduser(), update, state, group=group, resumed_from=resumed_from).run()


def _placed(name: str, entry: TensorEntry, places: Mapping[str, tuple[str, int, int]]) -> TensorEntry:
    pieces: list[TensorPiece] = []
    for piece in entry.pieces:
        file, begin, end = places[piece_key(name, piece.offsets)]
        pieces.append(piece._replace(file=file, begin=begin, end=end))
    return entry._replace(pieces=tuple(pieces))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write and sync a new file; an OSError names it."""
    num_bytes = 0
    file = storage.create(path)
    try:
        with Checksum() as checksum:
            for chunk in chunks:
                checksum.add(chunk)
                storage.write(file, chunk)
                num_bytes += len(chunk)
            storage.sync(file)
            return FileEntry(bytes=num_bytes, crc32=f"{checksum.value():08x}")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        storage.close(file)


def _cause(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    place = f" at `{error.filename}`" if error.filename else ""
    return f"{error.strerror or error} ({code}){place}"


def _free(folder: Path) -> str:
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        return f"{_size(storage.free_bytes(existing))} are free"
    except OSError as error:
        return f"how much is free cannot be told ({error.strerror})"


def _size(num_bytes: int) -> str:
    """
    >>> _size(2_500_000), _size(4_096)
    ('2.5 MB', '4.1 kB')
    """
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def _advice(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return "Raise the limit of a file's size (`ulimit -f`), or put the run on a file system that takes larger ones."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space, keep fewer checkpoints, or put the run on another disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return "Make that a folder that this user may write to, or put the run elsewhere."
    return "Look at the disk's health, or put the run on another one."
