"""The few operations by which a checkpoint changes a disk; each raises OSError when it fails.

All that saving and retention write, rename or remove goes through them, by the name of this module, so that a test can
fail, count or record each. Reading is not in it: that is plain files.
"""

import errno
import os
import shutil
from fcntl import F_GETFL, F_SETFL, fcntl
from io import FileIO
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
_WORTH_BYPASSING_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it
_NOT_SO = (errno.EINVAL, errno.ENOTSUP)


def make_folder(path: Path) -> None:
    """Make `path` and its parents, those that do not exist; the parents would survive a loss of power."""
    made = [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for parent in reversed(made):
        sync_folder(parent.parent)


def create(path: Path) -> FileIO:
    """Open a new file for writing; one that exists is an error."""
    return FileIO(path, "xb")


def write(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`; large pieces that begin at a block, in memory and in the file, go past the cache.

    A checkpoint is not read soon, and the cache would cost a copy of it and, for each page, fresh memory.
    """
    rest = memoryview(data)
    rest = rest[_write_past_cache(file, rest) :]
    while rest:
        rest = rest[file.write(rest) :]


def sync(file: FileIO) -> None:
    """Return once the file's content would survive a loss of power."""
    os.fsync(file.fileno())


def close(file: FileIO) -> None:
    """Close the file, also if that fails."""
    file.close()


def sync_folder(path: Path) -> None:
    """Return once the names in the folder `path` would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Let `source` be `target` at one instant; a file that is `target` is replaced."""
    source.replace(target)


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def free_bytes(path: Path) -> int:
    """The bytes that can still be written below the folder `path`."""
    return shutil.disk_usage(path).free


def _write_past_cache(file: FileIO, data: memoryview) -> int:
    blocks = data[: len(data) - len(data) % BLOCK_BYTES]
    if not _DIRECT or len(blocks) < _WORTH_BYPASSING_BYTES or (_address(blocks) | file.tell()) % BLOCK_BYTES:
        return 0
    flags, done = fcntl(file, F_GETFL), 0
    try:
        fcntl(file, F_SETFL, flags | _DIRECT)
        while done < len(blocks):
            done += file.write(blocks[done:])
    except OSError as error:
        if error.errno not in _NOT_SO:  # file systems without it, or with larger blocks
            raise
    finally:
        fcntl(file, F_SETFL, flags)
    return done


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data
