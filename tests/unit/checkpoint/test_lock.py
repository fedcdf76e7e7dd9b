"""One run per folder; what a killed one leaves is taken over, and said."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.checkpoint import LOCK, locked
from evenstep.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from evenstep.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as said:
        assert said == ""
        with (
            pytest.raises(CheckpointError),
            locked(tmp_path / "run"),
        ):
            pass
    assert list((tmp_path / "run").iterdir()) == []
    with locked(tmp_path / "run"):
        pass


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


@pytest.mark.parametrize("left", ["", "{", "[]", json.dumps({"pid": "x"})])
def test_a_lock_file_without_a_holder_is_no_obstacle(tmp_path: Path, left: str) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / ".lock.json").write_text(left)
    with locked(tmp_path) as said:
        assert said


def test_a_full_disk_is_a_fault_of_the_folder_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(CheckpointError):
            locked(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path) as said:
        assert said == ""
