"""A disk that fails at a chosen operation, and states to save."""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from torch import Tensor

from evenstep import files
from evenstep.checkpoint import tensor_file, weights

OPERATIONS = ("make_folder", "write", "sync_path", "rename", "remove_file", "remove_folder")
REAL = SimpleNamespace(save=tensor_file.save, **{name: getattr(files, name) for name in OPERATIONS})


class FailingDisk:
    """Inside the `with`, operation number `fail_at` (from 0) raises `code`; with `for_good`, all later ones too."""

    def __init__(self, fail_at: int | None = None, code: int = errno.ENOSPC, *, for_good: bool = False) -> None:
        self.fail_at = fail_at
        self.code = code
        self.for_good = for_good
        self.operations: list[str] = []
        self.failed = False

    def __enter__(self) -> Self:
        self._use(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._use(REAL)

    def _use(self, disk: object) -> None:
        for name in OPERATIONS:
            setattr(files, name, getattr(disk, name))
        for module in (tensor_file, weights):
            module.save = disk.save  # type: ignore[attr-defined]

    def _count(self, operation: str, path: Path) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        if self.fail_at is not None and (number == self.fail_at or (self.for_good and number > self.fail_at)):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code), str(path))

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        # a disk that is full takes a part of the bytes
        REAL.write(path, data[: len(data) // 2])
        self._count("write", path)
        path.write_bytes(data)

    def save(self, path: Path, values: Mapping[str, Tensor]) -> None:
        path.write_bytes(b"half")
        self._count("save", path)
        REAL.save(path, values)

    def sync_path(self, path: Path) -> None:
        self._count("sync_path", path)
        REAL.sync_path(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", source)
        REAL.rename(source, target)

    def remove_file(self, path: Path) -> None:
        self._count("remove_file", path)
        REAL.remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", path)
        REAL.remove_folder(path)


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
