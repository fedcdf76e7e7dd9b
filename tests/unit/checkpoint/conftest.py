"""A disk that fails at a chosen operation, and states to save."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

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
        for name in OPERATIONS:
            setattr(files, name, partial(self.operate, name))
        for module in (tensor_file, weights):
            module.save = partial(self.operate, "save")  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        for name in OPERATIONS:
            setattr(files, name, getattr(REAL, name))
        for module in (tensor_file, weights):
            module.save = REAL.save  # type: ignore[attr-defined]

    def operate(self, name: str, path: Path, *more: Any) -> None:
        if name in ("write", "save"):
            path.write_bytes(more[0][: len(more[0]) // 2] if name == "write" else b"half")  # as a full disk does
        number = len(self.operations)
        self.operations.append(name)
        if self.fail_at is not None and (number == self.fail_at or (self.for_good and number > self.fail_at)):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code), str(path))
        if name == "make_folder":  # by itself, so that what it does is one operation
            path.mkdir(parents=True, exist_ok=True)
        elif name == "write":
            path.write_bytes(more[0])
        else:
            getattr(REAL, name)(path, *more)


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
