"""Writes a checkpoint, which at every instant is complete or absent.

The first rank writes a state of whole tensors, a file for each part. Tensors that are cut over ranks are written by all
ranks, a file each.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any, TypeAlias, final
from zlib import crc32

from torch import Tensor

from evenstep import files
from evenstep.checkpoint.folders import CLAIM, MANIFEST, STATE, TABLE, disk_error, is_complete, step_name
from evenstep.checkpoint.manifest import FileEntry, digits, manifest_bytes
from evenstep.checkpoint.ranks import ALONE, RankGroup, on_all_ranks, together
from evenstep.checkpoint.retention import discard, settle_replaced
from evenstep.checkpoint.shard import (
    TensorEntry,
    TensorPiece,
    block_of,
    dealt,
    is_sharded,
    local_of,
    rank_file,
    table_content,
    whole_entry,
)
from evenstep.checkpoint.state import JSON, flat_state
from evenstep.checkpoint.tensor_file import write_tensors
from evenstep.errors import CheckpointError

Written: TypeAlias = Mapping[str, tuple[FileEntry, Mapping[str, Sequence[int]]]]
"""The files of tensors that one rank has written, by name; each with the checksums of its tensors."""


@final
class CheckpointWrite:
    """A checkpoint that is being saved; made by all ranks of `group` at once, as by `write_checkpoint`.

    `write` may run in any thread. `publish` follows when all ranks have written; `abandon` if a rank failed.

    Attributes:
        tensors: tensors that this rank writes, by file and by name in it.
        is_shared: True if tensors are cut over ranks, so that all ranks write.
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
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.is_shared = False
        self._staging = folder / f"{files.SAVING}{self.target.name}"
        self._group = group
        self._resumed_from = resumed_from
        self._is_first = group.rank == 0
        self._entries: dict[str, TensorEntry] = {}
        try:
            self._encoded = _json_bytes(self._plan(state))
        except BaseException as error:
            self.abandon(error)
            raise

    @property
    def written(self) -> list[str]:
        return [*self.tensors, *([TABLE, STATE] if self._is_first else [])]

    def write(self) -> Written:
        """Write and sync this rank's file of tensors."""
        try:
            return {name: write_tensors(self._staging / name, tensors) for name, tensors in self.tensors.items()}
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._is_first:
                raise CheckpointError(
                    f"rank {self._group.rank} on {gethostname()} does not see the folder `{self._staging}` of rank 0; "
                    f"put the run folder where all ranks see it."
                ) from error
            raise self._failed(error) from error

    def publish(self, results: Iterable[Written]) -> Path:
        """On the first rank, write the table, the values and last the manifest, and rename the folder."""
        if not self._is_first:
            return self.target
        try:
            self._bind({name: file for result in results for name, file in result.items()})
            if self.target.with_name(f"{files.REPLACED}{self.target.name}").exists():
                settle_replaced(self.target)
            replaced = files.put(self._staging, self.target)
            files.sync_path(self.target.parent)
            if replaced.exists():
                discard(replaced)
        except OSError as error:
            raise self._failed(error) from error
        return self.target

    def abandon(self, error: BaseException) -> None:
        """Remove the unfinished folder after `error`."""
        try:
            if self._is_first and self._staging.exists():
                discard(self._staging)
        except OSError as left:
            error.add_note(
                f" `{self._staging}` could not be removed ({left.strerror}); the next save or resume does it."
            )

    def run(self) -> Path:
        """Write and publish at once, all ranks together; gives the folder."""
        try:
            results = together(self._group, self.write)
            return together(self._group, lambda: self.publish(results))[0]
        except BaseException as error:
            self.abandon(error)
            raise

    def _plan(self, state: Mapping[str, object]) -> dict[str, JSON]:
        tensors, values = on_all_ranks(self._group, lambda: self._begin(state))
        self.is_shared = any(map(is_sharded, tensors.values()))
        own = {name: block_of(leaf) for name, leaf in tensors.items()} if self.is_shared else {}
        everybody = together(self._group, lambda: own)
        for rank, blocks in enumerate(everybody):
            if blocks.keys() != everybody[0].keys():
                raise CheckpointError(
                    f"the state of rank {rank} has other tensors, or other shards, than rank 0's; give all ranks the "
                    f"same tree, with an empty `Shard` of each tensor that a rank has no block of."
                )
        if self.is_shared:
            self._entries = dealt(everybody)
        elif self._is_first:
            self._entries = {path: whole_entry(path, tensor) for path, tensor in tensors.items()}
        mine = rank_file(self._group.rank)
        for path, entry in self._entries.items():
            for piece in entry.pieces:
                if piece.file == mine or not self.is_shared:
                    leaf = tensors[path]
                    tensor = local_of(leaf) if is_sharded(leaf) else leaf
                    self.tensors.setdefault(piece.file, {})[piece.name] = tensor
        return values

    def _begin(self, state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, JSON]]:
        tensors, values = flat_state(state, alone=self._group.ranks == 1)
        try:
            if self._is_first:
                if self._staging.exists():
                    discard(self._staging)
                files.make_folder(self._staging)
        except OSError as error:
            raise self._failed(error) from error
        return tensors, values

    def _bind(self, written: Written) -> None:
        def with_checksums(piece: TensorPiece) -> TensorPiece:
            return piece._replace(crc32=tuple(written[piece.file][1][piece.name]))

        table = {
            name: entry._replace(pieces=tuple(map(with_checksums, entry.pieces)))
            for name, entry in self._entries.items()
        }
        entries = {name: entry for name, (entry, _) in written.items()}
        entries[TABLE] = self._write_json(TABLE, _json_bytes(table_content(table)))
        entries[STATE] = self._write_json(STATE, self._encoded)
        manifest = manifest_bytes(self.update, entries, ranks=self._group.ranks, resumed_from=self._resumed_from)
        self._write_json(MANIFEST, manifest)
        files.sync_path(self._staging)

    def _write_json(self, name: str, content: bytes) -> FileEntry:
        files.write(self._staging / name, content)
        files.sync_path(self._staging / name)
        return FileEntry(bytes=len(content), crc32=digits(crc32(content)))

    def _failed(self, error: OSError) -> CheckpointError:
        return disk_error(
            f"the checkpoint of update {self.update} could not be written to `{self.target}`, where it may be "
            f"missing after a loss of power (earlier checkpoints are untouched)",
            error,
        )


def write_checkpoint(
    folder: Path | str,
    update: int,
    state: Mapping[str, object],
    *,
    group: RankGroup = ALONE,
    resumed_from: str | None = None,
) -> Path:
    """Write `state` as the checkpoint of `update`; gives its folder when it would survive a loss of power.

    Raises CheckpointError on all ranks, if any can't save its part; earlier checkpoints are untouched.

    Args:
        folder: of checkpoints, `RUN/checkpoints`, the same on all ranks; made if need be.
        update: number of committed updates in the state.
        state: a nested tree of dict, list, tuple, set, Tensor, str, numbers and None. Plain values are those of rank 0.
        group: the ranks, all of which call this.
        resumed_from: the checkpoint that the run went on from, for people.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as run:
    ...     path = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     path.name, sorted(file.name for file in path.iterdir())
    ('step-00000010', ['manifest.json', 'model.safetensors', 'state.json', 'tensors.json'])
    """
    return CheckpointWrite(Path(folder).expanduser(), update, state, group=group, resumed_from=resumed_from).run()


def write_emergency(
    folder: Path, update: int, state: Mapping[str, object], *, resumed_from: str | None = None
) -> Path | None:
    """Write the whole `state` of a failing run without other ranks; None if it exists or another rank writes it."""
    name = step_name(update)
    if is_complete(folder / name):
        return None
    claim = folder / f"{CLAIM}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim.mkdir()
    except FileExistsError:
        return None
    except OSError as error:
        raise disk_error(f"nothing can be saved in `{folder}`", error) from error
    try:
        return write_checkpoint(folder, update, state, resumed_from=resumed_from)
    finally:
        claim.rmdir()


def _json_bytes(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
