"""The few operations by which a checkpoint changes a disk, as one seam.

Everything that saving and retention write, rename or remove goes through a `Disk`, so that a test can fail, count
or record each operation, and another kind of storage is one class. Reading is not in it: that is plain files.
"""

import os
import shutil
from abc import ABC, abstractmethod
from io import FileIO
from pathlib import Path
from typing import final


class Disk(ABC):
    """What a checkpoint needs of a disk; every operation raises OSError when it fails."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Make `path` and its parents, those that do not exist."""

    @abstractmethod
    def create(self, path: Path) -> FileIO:
        """Open a new file for writing; one that exists is an error."""

    @abstractmethod
    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        """Write all of `data`."""

    @abstractmethod
    def sync(self, file: FileIO) -> None:
        """Return once the file's content would survive a loss of power."""

    @abstractmethod
    def close(self, file: FileIO) -> None:
        """Close the file, also if that fails."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Return once the names in the folder `path` would survive a loss of power."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Let `source` be `target` at one instant; a file that is `target` is replaced."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """The bytes that can still be written below the folder `path`."""


@final
class LocalDisk(Disk):
    """The file system of this machine."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        return FileIO(path, "xb")

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: FileIO) -> None:
        os.fsync(file.fileno())

    def close(self, file: FileIO) -> None:
        file.close()

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


LOCAL_DISK = LocalDisk()
