"""Saves go on while the state changes, never fail in silence, and are copied to stores, complete or not at all."""

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from evenstep.checkpoint import AsyncWriter, CheckpointReader, Mirror, read_checkpoint, verify, write_checkpoint
from evenstep.errors import CheckpointError
from newest import newest_checkpoint

State = Callable[[int], dict[str, object]]


def gated(failing_disk: type[Any], gate: threading.Event) -> Any:
    """A disk that writes nothing before the gate is open."""

    class Gated(failing_disk):
        def operate(self, name: str, path: Path, *more: Any) -> None:
            assert name != "save" or gate.wait(20)
            super().operate(name, path, *more)

    return Gated()


def test_what_is_saved_is_the_state_at_the_beginning(folder: Path, failing_disk: type[Any]) -> None:
    gate = threading.Event()
    weight = torch.arange(6.0)
    state = {"model": {"w": weight, "t": torch.arange(6.0).view(2, 3).T, "c": torch.tensor(2j).conj()}, "lr": [0.1]}
    saver = AsyncWriter(folder)
    with gated(failing_disk, gate):
        saver.begin(1, state)
        weight.fill_(-1)
        state["lr"] = [0.2]
        assert saver.poll() is None
        gate.set()
        saved = saver.wait()
    assert saved is not None
    assert (saved.update, saved.path, saved.error) == (1, folder / "step-00000001", None)
    found: Any = read_checkpoint(folder).state
    assert found["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["model"]["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found["model"]["c"].item(), found["lr"]) == (-2j, [0.1])
    assert saver.wait() is None


@pytest.mark.parametrize("code", [errno.ENOSPC])
def test_a_failed_save_is_told_and_the_next_one_succeeds(
    folder: Path, state: State, failing_disk: type[Any], code: int
) -> None:
    saver = AsyncWriter(folder)
    with failing_disk() as counted:
        saver.begin(1, state(1))
        assert saver.wait().error is None
    for number in range(1, len(counted.operations)):
        saver = AsyncWriter(folder)
        try:
            with failing_disk(number, code):
                saver.begin(2, state(2))
                saved = saver.wait()
        except CheckpointError as error:  # before anything was written
            assert errno.errorcode[code] in str(error)
            continue
        assert isinstance(saved.error, CheckpointError)
        assert errno.errorcode[code] in str(saved.error)
        assert newest_checkpoint(folder)[0] is not None
        saver.begin(3, state(3))
        assert saver.wait().path == folder / "step-00000003"


def test_a_disk_that_hangs_is_given_up_after_the_timeout(folder: Path, state: State, failing_disk: type[Any]) -> None:
    gate = threading.Event()
    saver = AsyncWriter(folder, timeout_s=0.05)
    with gated(failing_disk, gate):
        saver.begin(1, state(1))
        saved = saver.wait()
        gate.set()
    assert saved is not None
    assert "was not written within 0.05 s" in str(saved.error)


def test_a_save_in_flight_is_brought_to_an_end_without_the_others(folder: Path, state: State) -> None:
    class Gone:
        rank, ranks = 0, 2

        def __init__(self) -> None:
            self.left = 3  # for the names, the plans, and who has a copy

        def gather(self, value: Any) -> list[Any]:
            if not self.left:
                raise ConnectionError("the other rank is gone")
            self.left -= 1
            return [value, value]

    saver = AsyncWriter(folder, group=Gone())
    saver.begin(1, state(1))
    saved = saver.end_alone()
    assert saved is not None
    assert saved.path == folder / "step-00000001"
    assert saver.end_alone() is None
    assert newest_checkpoint(folder)[0].path == saved.path


def test_ranks_that_wait_for_a_slow_one_talk_to_it_all_the_while(
    folder: Path, state: State, failing_disk: type[Any]
) -> None:
    class Counting:
        rank, ranks, said = 0, 2, 0

        def gather(self, value: Any) -> list[Any]:
            self.said += 1
            return [value, value]

    gate, group = threading.Event(), Counting()
    saver = AsyncWriter(folder, group=group)
    with gated(failing_disk, gate):
        saver.begin(1, state(1))
        threading.Timer(1.2, gate.set).start()
        before = group.said
        saved = saver.wait()
    assert saved is not None
    assert saved.path == folder / "step-00000001"
    assert group.said - before > 4  # that every save needs


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
