"""Copies of checkpoints in a store without renames are complete or absent, at whatever operation a process dies."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from evenstep.checkpoint import AsyncWriter, CheckpointReader, Mirror, verify, write_checkpoint
from evenstep.errors import CheckpointError

State = Callable[[int], dict[str, object]]


class Died(BaseException):
    """The process is killed: nothing more is done."""


class Store:
    """What changes the store is counted; from operation `dies_at` (from 0) on nothing is done any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dies_at: int | None = None
        self.error: Callable[[], BaseException] = Died
        self.operations: list[str] = []
        for name in ("put_file", "pipe_file", "rm_file"):
            monkeypatch.setattr(MemoryFileSystem, name, self._counted(name, getattr(MemoryFileSystem, name)))

    def _counted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: MemoryFileSystem, *arguments: Any, **more: Any) -> Any:
            number = len(self.operations)
            # the store's own calls end there, so that `put_file`, which calls `pipe_file`, is one
            self.operations.append(f"{name} {Path(arguments[-1] if name == 'put_file' else arguments[0]).name}")
            if self.dies_at is not None and number >= self.dies_at:
                raise self.error()
            return act(store, *arguments, **more)

        return counted


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    MemoryFileSystem.store.clear()
    yield Mirror("memory://copies", "run")
    MemoryFileSystem.store.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def contents(step: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in step.iterdir()}


def test_a_copy_comes_back_byte_by_byte(mirror: Mirror, folder: Path, tmp_path: Path, state: State) -> None:
    step = write_checkpoint(folder, 7, state(7))
    mirror.copy(step)
    assert mirror.steps() == ["step-00000007"]
    fetched = mirror.fetch("step-00000007", tmp_path / "new/checkpoints")
    assert contents(fetched) == contents(step)
    assert verify(fetched).update == 7


def test_whoever_dies_at_any_operation_leaves_complete_copies_or_none(
    mirror: Mirror, store: Store, folder: Path, tmp_path: Path, state: State
) -> None:
    steps = [write_checkpoint(folder, update, state(update)) for update in (1, 2, 3)]
    again = write_checkpoint(tmp_path / "again", 3, state(30))

    def work() -> None:
        mirror.copy(steps[2])
        mirror.retain(keep_last=2, keep_every_updates=None, protect=())
        mirror.copy(again)  # the same update once more, of another past
        mirror.remove("step-00000002")

    allowed = [contents(step) for step in (*steps, again)]
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        store.dies_at = None
        for step in steps[:2]:
            mirror.copy(step)
        store.operations.clear()
        store.dies_at = number
        try:
            work()
        except Died:
            ended = False
        else:
            ended = True
        store.dies_at = None
        names = mirror.steps()
        assert names, "there is one at each instant"
        for name in names:
            fetched = mirror.fetch(name, tmp_path / f"fetched-{number}")
            assert contents(fetched) in allowed
            assert verify(fetched).update == int(name[-8:])
        assert len(mirror.clean()) <= 1
        left = {path.split("/")[-2] for path in MemoryFileSystem.store}
        assert left == set(names)
        if ended:
            break
    assert number > 12
    assert names == ["step-00000003"]
    assert contents(fetched) == contents(again)


def test_a_store_that_fails_leaves_the_checkpoint_here_and_is_said(
    mirror: Mirror, store: Store, folder: Path, state: State
) -> None:
    writer = AsyncWriter(folder, mirror=mirror)
    store.error, store.dies_at = lambda: PermissionError("AccessDenied"), 0
    writer.begin(1, state(1))
    saved = writer.wait()
    assert saved is not None
    assert saved.path == folder / "step-00000001"
    assert isinstance(saved.error, CheckpointError)
    store.dies_at = None
    writer.begin(2, state(2))
    saved = writer.wait()
    assert saved is not None
    assert saved.error is None
    assert mirror.steps() == ["step-00000002"]
    assert CheckpointReader(folder).update == 2
