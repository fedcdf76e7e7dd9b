"""The same run on 1, 2, 3, 4 and 8 ranks: one sha256; equal up to rounding where sums are fast."""

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
UPDATES = 30


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
def on_one() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "single", 1)


def same(strategy: str, ranks: int) -> tuple[str, str]:
    """sha256 on `ranks` ranks, and on one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), strategy, ranks), on_one()


def parameters(strategy: str, ranks: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), strategy, ranks)
        state = torch.load(Path(folder) / "parameters.pt", weights_only=True)
        return torch.cat([tensor.flatten() for tensor in state.values()]).double()


@cache
def single() -> torch.Tensor:
    return parameters("single", 1)


def fast(strategy: str, ranks: int) -> tuple[float, float]:
    """Relative difference of the parameters to those of one process, and its bound."""
    wanted = single()
    return float((parameters(strategy, ranks) - wanted).norm() / wanted.norm()), 1e-6


def moved(layouts: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """sha256 of a run that is stopped and resumed on each of `layouts` in turn, and of one rank straight."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [UPDATES * (place + 1) // len(layouts) for place in range(len(layouts))]
        printed = [run(Path(folder), *layout, end) for layout, end in zip(layouts, ends, strict=True)]
        return printed[-1], on_one()


SHA = "sha256 of all that training changes"
NEAR = "relative difference to one process"
MOVES: dict[str, Sequence[tuple[str, int]]] = {
    "ddp × 1, 4, 2": [("ddp", 1), ("ddp", 4), ("ddp", 2)],
    "ddp × 3, fsdp × 4, single": [("ddp", 3), ("fsdp", 4), ("single", 1)],
    "single, zero1 × 4, fsdp × 2": [("single", 1), ("zero1", 4), ("fsdp", 2)],
}
LAYOUTS = [
    *(("ddp", ranks) for ranks in (2, 3, 4, 8)),  # of 8, some have no work in a last, short global batch
    *(("zero1", ranks) for ranks in (2, 4)),
    *(("fsdp", ranks) for ranks in (2, 3, 4)),
    ("hybrid", 4),
]
ROWS = [
    *(
        Row(name=f"ranks {strategy} × {ranks}", measure=SHA, run=partial(same, strategy, ranks))
        for strategy, ranks in LAYOUTS
    ),
    *(
        Row(name=f"ranks resumed on {name}", measure=SHA, run=partial(moved, layouts))
        for name, layouts in MOVES.items()
    ),
    *(
        Row(name=f"ranks {name} × {ranks}", measure=NEAR, run=partial(fast, name, ranks))
        for name, ranks in (("fast ddp", 4), ("fast zero1", 2), ("fast fsdp", 2), ("fast hybrid", 4))
    ),
]
