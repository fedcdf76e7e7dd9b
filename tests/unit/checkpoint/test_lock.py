"""One run per folder; what a killed one leaves is taken over, and said."""

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
