"""The same run on 1, 2 and 4 ranks: one sha256 where sums are ordered, equal up to rounding where they are fast."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from rows.row import Row

SCRIPT = Path(__file__).with_name("ranked.py")
TIMEOUT_S = 180
UPDATES = 50


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(folder: Path, strategy: str, ranks: int, updates: int = UPDATES) -> str:
    """Run all ranks to the end; what rank 0 printed."""
    return started([str(SCRIPT), str(folder), strategy, str(updates)], ranks)


def started(arguments: Sequence[str], ranks: int) -> str:
    """Run a Python program as `ranks` ranks to the end; what rank 0 printed."""
    command = [sys.executable, *arguments]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {process.returncode}:\n{errors}")
    return said[0][0].strip()


@cache
def ordered_on_one() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "ordered", 1)


def ordered(ranks: int) -> tuple[str, str]:
    """sha256 on `ranks` ranks, and on one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "ordered", ranks), ordered_on_one()


def parameters(strategy: str, ranks: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), strategy, ranks)
        return torch.load(Path(folder) / "parameters.pt", weights_only=True).double()


@cache
def single() -> torch.Tensor:
    return parameters("single", 1)


def fast(ranks: int) -> tuple[float, float]:
    """Relative difference of the parameters to those of one process, and its bound."""
    wanted = single()
    return float((parameters("ddp", ranks) - wanted).norm() / wanted.norm()), 1e-6


def moved(layouts: Sequence[int]) -> tuple[str, str]:
    """sha256 of a run that is stopped and resumed on each of `layouts` ranks in turn, and of one rank straight."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [UPDATES * (place + 1) // len(layouts) for place in range(len(layouts))]
        printed = [run(Path(folder), "ordered", ranks, end) for ranks, end in zip(layouts, ends, strict=True)]
        return printed[-1], ordered_on_one()


SHA = "sha256 of all that training changes"
ROWS = [
    Row(name="ranks ordered, 2 × 4", measure=SHA, run=partial(ordered, 2)),
    Row(name="ranks ordered, 4 × 2, ranks without work", measure=SHA, run=partial(ordered, 4)),
    Row(name="ranks ordered, resumed on 1, 4, 2", measure=SHA, run=partial(moved, [1, 4, 2])),
    Row(name="ranks ddp, fast, 2 × 4", measure="relative difference to one process", run=partial(fast, 2)),
    Row(name="ranks ddp, fast, 4 × 2", measure="relative difference to one process", run=partial(fast, 4)),
]
