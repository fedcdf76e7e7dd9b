"""Files and folders on a disk: replaced at one instant, and kept through a loss of power.

Checkpoints and all other files that replace older ones are written, synced, renamed and removed through these
functions, by the name of this module, so that tests can fail, count or record each operation.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

SAVING, REPLACED = ".saving-", ".replaced-"


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Generator[Path]:
    """Write a new file or folder at the path given, beside `path`; it gets the name `path` at the end of the `with`.

    Readers see the old content or the new content, never a part. A folder that is replaced is called `.replaced-NAME`
    for an instant. With `sync` the new content survives a loss of power.
    """
    new = path.with_name(f"{SAVING}{path.name}")
    remove(new)
    try:
        yield new
        if sync:
            _sync_tree(new)
        replaced = put(new, path)
        if sync:
            sync_path(path.parent)
    except BaseException:
        with suppress(OSError):
            remove(new)
        raise
    remove(replaced)


def put(new: Path, path: Path) -> Path:
    """Rename `new` to `path`; gives the path that a replaced folder then has, for the caller to remove."""
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if path.is_dir() and not path.is_symlink():
        remove(replaced)
        rename(path, replaced)
    try:
        rename(new, path)
    except BaseException:
        if replaced.exists() and not path.exists():
            rename(replaced, path)
        raise
    return replaced


def make_folder(path: Path) -> None:
    """Make the folder `path` and its parents; new parents survive a loss of power."""
    made = [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for parent in reversed(made):
        sync_path(parent.parent)


def write(path: Path, data: bytes) -> None:
    """Write the new file `path`."""
    with path.open("xb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def sync_path(path: Path) -> None:
    """Return once the content of the file `path`, or the names in the folder `path`, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give the file or folder `source` the name `target`, in the place of a file that has it."""
    source.replace(target)


def remove(path: Path) -> None:
    """Remove the file, the link or the folder `path` with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            remove(inner)
        remove_folder(path)
    elif os.path.lexists(path):
        remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file or a link."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _sync_tree(inner)
    sync_path(path)
