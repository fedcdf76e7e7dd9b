"""Saves go on while the state changes, one after the other, and never fail in silence."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import AsyncWriter, read_checkpoint
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
