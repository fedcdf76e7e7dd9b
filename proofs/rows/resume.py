"""Runs that are killed with SIGKILL and resumed, against the same run undisturbed: one sha256."""

import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from rows.row import Row

SCRIPT = Path(__file__).with_name("killed.py")
TIMEOUT_S = 120


def run(folder: str, workers: int, *kill_at: int) -> tuple[int, str]:
    """The exit code of one process of the run, and what it printed."""
    command = [sys.executable, str(SCRIPT), folder, str(workers), *map(str, kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode not in (0, -9):
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr}")
    return done.returncode, done.stdout.strip()


@cache
def undisturbed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(folder, 0)[1]


def killed(workers: int, *kills: tuple[int, int]) -> tuple[str, str]:
    """sha256 of the run that was killed at each (update, micro-batch), and of the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        for kill in kills:
            code, _ = run(folder, workers, *kill)
            if code != -9:
                raise RuntimeError(f"the run was to be killed at {kill}, but exited {code}")
        return run(folder, workers)[1], undisturbed()


WAYS: dict[str, tuple[int, *tuple[tuple[int, int], ...]]] = {
    "2 workers, not killed": (2,),
    "killed before the first checkpoint": (0, (2, 0)),
    "killed mid-epoch": (0, (10, 0)),
    "killed mid-accumulation": (0, (15, 2)),
    "killed mid-epoch, 2 workers": (2, (9, 1)),
    "killed three times": (0, (5, 0), (13, 3), (22, 1)),
}

ROWS = [
    Row(name=f"resume {name}", measure="sha256 of all that training changes", run=partial(killed, *context))
    for name, context in WAYS.items()
]
