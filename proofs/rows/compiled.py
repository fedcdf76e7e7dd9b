"""Runs that torch compiles, killed with SIGKILL between checkpoints and resumed, against one left alone: one sha256."""

import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from rows.ranks import SHA, TIMEOUT_S
from rows.row import Row

SCRIPT = Path(__file__).with_name("compiled_run.py")
KILLS = ((6, 1), (11, 0))  # within an accumulation, and between updates
WAYS = {
    "update": ("32-true", "bf16-mixed", "16-mixed"),
    "model": ("32-true",),
}


def run(folder: str, compile: str, precision: str, *kill_at: int) -> str:
    """What one process of the run printed; it must be killed where that is asked for, and else reach its end."""
    command = [sys.executable, str(SCRIPT), folder, compile, precision, *map(str, kill_at)]
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != (-9 if kill_at else 0):
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


@cache
def alone(compile: str, precision: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(folder, compile, precision)


def killed(compile: str, precision: str) -> tuple[str, str]:
    """sha256 of the run that was killed twice, and of the one left alone."""
    with tempfile.TemporaryDirectory() as folder:
        for kill in KILLS:
            run(folder, compile, precision, *kill)
        return run(folder, compile, precision), alone(compile, precision)


ROWS = [
    Row(name=f"compiled {compile}, {precision}, killed twice", measure=SHA, run=partial(killed, compile, precision))
    for compile, precisions in WAYS.items()
    for precision in precisions
]
