"""A disk that fails at a chosen operation, and states to save."""

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch

from evenstep.checkpoint import storage

OPERATIONS = (
    *("make_folder", "create", "write", "sync", "close", "sync_folder", "rename", "remove", "remove_folder"),
    "free_bytes",
)
REAL = SimpleNamespace(**{name: getattr(storage, name) for name in OPERATIONS})


class FailingDisk:
    """Inside the `with`, operation number `fail_at` (from 0) raises `code`; with `for_good`, all later ones too."""

    def __init__(self, fail_at: int | None = None, code: int = errno.ENOSPC, *, for_good: bool = False) -> None:
        self.fail_at = fail_at
        self.code = code
        self.for_good = for_good
        self.operations: list[str] = []
        self.failed = False

    def __enter__(self) -> Self:
        for name in OPERATIONS:
            setattr(storage, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name in OPERATIONS:
            setattr(storage, name, getattr(REAL, name))

    def _count(self, operation: str) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        if self.fail_at is not None and (number == self.fail_at or (self.for_good and number > self.fail_at)):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, path: Path) -> None:
        self._count("make_folder")
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        self._count("create")
        return REAL.create(path)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        # a disk that is full takes a part of the bytes
        half = memoryview(data)[: len(data) // 2]
        REAL.write(file, half)
        self._count("write")
        REAL.write(file, memoryview(data)[len(half) :])

    def sync(self, file: FileIO) -> None:
        self._count("sync")
        REAL.sync(file)

    def close(self, file: FileIO) -> None:
        REAL.close(file)
        self._count("close")

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder")
        REAL.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        REAL.rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove")
        REAL.remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder")
        REAL.remove_folder(path)

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
