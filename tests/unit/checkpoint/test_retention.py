"""Folders of checkpoints: one run each, old ones go, never the only sound one."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.checkpoint import (
    LOCK,
    clean_leftovers,
    complete_checkpoints,
    locked,
    retain,
    verify,
    write_checkpoint,
)
from evenstep.errors import CheckpointError
from newest import newest_checkpoint

State = Callable[[int], dict[str, object]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def five(folder: Path, state: State) -> Path:
    for update in (1, 2, 3, 4, 5):
        write_checkpoint(folder, update, state(update))
    return folder


@settings(max_examples=40, deadline=None)
@given(keep_last=st.integers(1, 6), damaged=st.sets(st.integers(1, 4)), protected=st.sets(st.integers(1, 4)))
def test_whatever_is_kept_the_newest_sound_one_is(
    tmp_path_factory: pytest.TempPathFactory, keep_last: int, damaged: set[int], protected: set[int]
):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for update in (1, 2, 3, 4):
        path = write_checkpoint(folder, update, {"progress": update})
        if update in damaged:
            (path / "state.json").unlink()
    before, _ = newest_checkpoint(folder)
    retain(folder, keep_last=keep_last, protect=[f"step-{update:08d}" for update in protected])
    after, _ = newest_checkpoint(folder)
    assert (before and before.update) == (after and after.update)
    left = {int(path.name[5:]) for path in complete_checkpoints(folder)}
    sound = sorted({1, 2, 3, 4} - damaged)
    assert left == damaged | protected | set(sound[-keep_last:])


def test_leftovers_of_killed_saves_and_deletions_are_removed_and_said(five: Path):
    for name in (".saving-step-00000006", ".removing-step-00000001"):
        (five / name / "inner").mkdir(parents=True)
        (five / name / "model.safetensors").write_bytes(b"half")
    assert len(clean_leftovers(five)) == 2
    assert len(names(five)) == 5
    assert clean_leftovers(five) == []


@pytest.mark.parametrize("has_new", [False, True], ids=["undone", "finished"])
def test_an_interrupted_replacement_is_undone_or_finished(folder: Path, state: State, has_new: bool):
    write_checkpoint(folder, 4, state(4)).rename(folder / ".replaced-step-00000004")
    if has_new:
        write_checkpoint(folder.parent / "x", 4, state(4)).rename(folder / "step-00000004")
    assert len(clean_leftovers(folder)) == 1
    assert names(folder) == ["step-00000004"]
    assert verify(folder).update == 4


HOLD = """
import sys, time
from pathlib import Path
from evenstep.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_refused_while_it_lives_and_taken_over_when_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        with locked(tmp_path) as said:
            assert said.startswith(f"took over the lock of process {holder.pid} on ")
    assert not (tmp_path / LOCK).exists()
