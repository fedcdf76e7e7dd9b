"""A disk that fails at a chosen operation, and states to save."""

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch

from evenstep.checkpoint import Disk


class FailingDisk(Disk):
    """The local disk, but operation number `fail_at` (from 0) raises `code`; with `for_good`, all later ones too."""

    def __init__(self, fail_at: int | None = None, code: int = errno.ENOSPC, *, for_good: bool = False) -> None:
        self.fail_at = fail_at
        self.code = code
        self.for_good = for_good
        self.operations: list[str] = []
        self.failed = False
        self._disk = Disk()

    def _count(self, operation: str) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        if self.fail_at is not None and (number == self.fail_at or (self.for_good and number > self.fail_at)):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, path: Path) -> None:
        self._count("make_folder")
        self._disk.make_folder(path)

    def create(self, path: Path) -> FileIO:
        self._count("create")
        return self._disk.create(path)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        # a disk that is full takes a part of the bytes
        half = memoryview(data)[: len(data) // 2]
        self._disk.write(file, half)
        self._count("write")
        self._disk.write(file, memoryview(data)[len(half) :])

    def sync(self, file: FileIO) -> None:
        self._count("sync")
        self._disk.sync(file)

    def close(self, file: FileIO) -> None:
        self._disk.close(file)
        self._count("close")

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        self._disk.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        self._disk.rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove")
        self._disk.remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder")
        self._disk.remove_folder(path)

    def free_bytes(self, path: Path) -> int:
        return 5_000_000


@pytest.fixture
def failing_disk() -> type[FailingDisk]:
    return FailingDisk


@pytest.fixture
def state() -> Callable[[int], dict[str, object]]:
    """A small state whose every value tells its update."""

    def make(update: int) -> dict[str, object]:
        return {
            "model": {"layer.weight": torch.full((3, 2), float(update)), "layer.bias": torch.full((3,), update)},
            "optimizer": {"state": {0: {"step": torch.tensor(float(update))}}, "param_groups": [{"lr": 0.1}]},
            "progress": {"update": update, "best": float("-inf")},
        }

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"
