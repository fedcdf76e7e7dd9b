"""Writes a checkpoint so that at every instant it is either complete or not there.

    .saving-step-…/ ← one safetensors file per part with tensors, state.json, each synced
                    ← manifest.json with every file's size and checksum, last
    sync the folder, rename it to step-…, sync its parent, then let `latest` say its name

A checkpoint of the same update is replaced, since after a rewind it would be of a past that did not happen; it
stays readable until the new one has its name. Nothing is deleted here besides; see `retention`.
"""

import errno
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from zlib import crc32

from evenstep.checkpoint.layout import (
    LATEST,
    LATEST_SAVING,
    REPLACED,
    SAVING,
    STATE,
    TENSORS_SUFFIX,
    step_name,
)
from evenstep.checkpoint.manifest import FILE_NAME, MANIFEST, FileEntry, manifest_bytes, new_manifest
from evenstep.checkpoint.retention import discard, settle_replaced
from evenstep.checkpoint.state import JSON, pack
from evenstep.checkpoint.storage import LOCAL_DISK, Disk
from evenstep.checkpoint.tensorfile import TensorFile
from evenstep.errors import CheckpointError


def write_checkpoint(folder: Path, update: int, state: Mapping[str, object], *, disk: Disk = LOCAL_DISK) -> Path:
    """Write `state` as the checkpoint of `update`, and return its folder once it would survive a loss of power.

    Each top-level key of the state that holds tensors becomes `KEY.safetensors`, the tensors named by their path
    below the key; everything else goes to `state.json`. Of tied tensors in one file the first name is stored, as
    `safetensors.torch.load_model` expects.

    Args:
        folder: the folder of checkpoints, `RUN/checkpoints`; made if need be. `RUN/latest` is then set.
        update: number of committed updates in the state.
        state: a nested tree of dict, list, tuple, Tensor, str, int, float, bool and None; must not change meanwhile.
        disk: through which all is written.

    Raises:
        CheckpointError: a state that cannot be saved, or a disk that does not take it. Whatever was begun is
            removed, earlier checkpoints are as they were.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as run:
    ...     path = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     path.name, sorted(file.name for file in path.iterdir()), (Path(run) / "latest").read_text()
    ('step-00000010', ['manifest.json', 'model.safetensors', 'state.json'], 'step-00000010\\n')
    """
    files, skeletons = _pack(state)
    encoded = json.dumps(skeletons, separators=(",", ":")).encode()
    num_bytes = len(encoded) + sum(file.size for file in files.values())
    target = folder / step_name(update)
    staging = folder / f"{SAVING}{target.name}"
    try:
        _stage(staging, update, files, encoded, disk)
        _publish(staging, target, update, disk)
    except BaseException as error:
        leftover = _remove_staging(staging, disk)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint of update {update} could not be written to `{target}`: {_cause(error)}. It needs "
            f"{num_bytes / 1e6:.1f} MB and {_free(folder, disk)}; earlier checkpoints are untouched. "
            f"{_advice(error)}{leftover}"
        ) from error
    try:
        _finish(target, disk)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of update {update} is complete in `{target}`, but what follows its writing failed "
            f"({_cause(error)}), so it may not survive a loss of power or `{LATEST}` may name an older one. "
            f"{_advice(error)}"
        ) from error
    return target


def _pack(state: Mapping[str, object]) -> tuple[dict[str, TensorFile], dict[str, JSON]]:
    files: dict[str, TensorFile] = {}
    skeletons: dict[str, JSON] = {}
    for part, tree in state.items():
        if not FILE_NAME.fullmatch(part):
            raise CheckpointError(
                f"{part!r} cannot be a top-level key of a state, as it names a file; use letters, digits, `_` and `-`."
            )
        tensors, skeletons[part] = pack(tree, part)
        if tensors:
            files[f"{part}{TENSORS_SUFFIX}"] = TensorFile(tensors)
    return files, skeletons


def _stage(staging: Path, update: int, files: Mapping[str, TensorFile], encoded: bytes, disk: Disk) -> None:
    if staging.exists():
        discard(staging, disk)
    disk.make_folder(staging)
    entries = {name: _write_file(staging / name, file.chunks(), disk) for name, file in files.items()}
    entries[STATE] = _write_file(staging / STATE, [encoded], disk)
    _write_file(staging / MANIFEST, [manifest_bytes(new_manifest(update, entries))], disk)
    disk.sync_folder(staging)


def _publish(staging: Path, target: Path, update: int, disk: Disk) -> None:
    replaced = _replaced(target)
    if replaced.exists():
        settle_replaced(target.parent, update, disk)
    if target.exists():
        disk.rename(target, replaced)
    try:
        disk.rename(staging, target)
    except BaseException:
        if replaced.exists() and not target.exists():
            disk.rename(replaced, target)
        raise


def _finish(target: Path, disk: Disk) -> None:
    """Make the new name durable, drop what it replaced, and let `latest` hold it."""
    disk.sync_folder(target.parent)
    if _replaced(target).exists():
        discard(_replaced(target), disk)
    run = target.parent.parent
    pointer = run / LATEST_SAVING
    if pointer.exists():
        disk.remove(pointer)
    _write_file(pointer, [f"{target.name}\n".encode()], disk)
    disk.rename(pointer, run / LATEST)
    disk.sync_folder(run)


def _replaced(target: Path) -> Path:
    return target.with_name(f"{REPLACED}{target.name}")


def _write_file(path: Path, chunks: Iterable[bytes | memoryview], disk: Disk) -> FileEntry:
    num_bytes = checksum = 0
    file = disk.create(path)
    try:
        for chunk in chunks:
            disk.write(file, chunk)
            checksum = crc32(chunk, checksum)
            num_bytes += len(chunk)
        disk.sync(file)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        disk.close(file)
    return FileEntry(bytes=num_bytes, crc32=f"{checksum:08x}")


def _remove_staging(staging: Path, disk: Disk) -> str:
    """Remove what was begun; a sentence on what could not be."""
    try:
        if staging.exists():
            discard(staging, disk)
    except OSError as error:
        return f" `{staging}` could not be removed ({error.strerror}); the next save or resume does it."
    return ""


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
