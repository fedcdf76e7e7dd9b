"""Starts the ranks of `rank.py` as processes, and gives what each of them said and how it ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("rank.py")
LIMIT_S = 300  # for the slowest of machines


@dataclass(frozen=True, slots=True)
class Said:
    """What one process said.

    Args:
        code: its exit code.
        said: its line of JSON; {} if it left none.
        err: its standard error.
        seconds: until it ended, since all were started.
    """

    code: int | None
    said: dict[str, Any]
    err: str
    seconds: float


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(ranks: int, *, frozen: tuple[int, ...] = (), **what: Any) -> list[Said]:
    """Run all ranks to their ends; those that are `frozen` are killed when the others have ended."""
    folder = Path(what["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    began = time.monotonic()
    errors = [folder / f"stderr-{rank}.txt" for rank in range(ranks)]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        with errors[rank].open("w") as said_wrong:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), json.dumps(what)],
                    env=os.environ | (address | {"RANK": str(rank)} if ranks > 1 else {}),
                    stdout=subprocess.PIPE,
                    stderr=said_wrong,
                    text=True,
                )
            )
    ends: dict[int, float] = {}
    try:
        while len(ends) < ranks - len(frozen) and time.monotonic() - began < LIMIT_S:
            for rank, process in enumerate(processes):
                if rank not in ends and rank not in frozen and process.poll() is not None:
                    ends[rank] = time.monotonic() - began
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    results = []
    for rank, (process, error) in enumerate(zip(processes, errors, strict=True)):
        out, _ = process.communicate(timeout=20)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        results.append(Said(process.returncode, said, error.read_text(), ends.get(rank, LIMIT_S)))
    return results
