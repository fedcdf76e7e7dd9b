"""What pipelines cost: beside the simulation of their plans, and beside torch's own pipelining runtime.

Two parts, each measured by ranks of its own: what every schedule takes with stages that sleep (`pipelines.sleeping`),
and what time and memory transformer stages take (`pipelines.beside_torch`). All times are by the clock on the wall,
since waiting for other ranks is what they are about.
"""

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first

from evenstep.parallel import Processes  # noqa: E402
from harness.row import Row, read_rows, table, write_rows  # noqa: E402

RESULTS = HERE / "results" / "pipeline.json"
PARTS = ("pipelines.sleeping", "pipelines.beside_torch")
TIMEOUT_S = 1800


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def as_rank(part: str, out: Path) -> None:
    """Measure as one of the ranks of a part."""
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=120)
    rows = importlib.import_module(part).rows(group)
    if group.rank == 0:
        write_rows(out, rows)
    group.gather(None)
    group.close()


def rows_of(part: str) -> list[Row]:
    """The rows of one part, measured by ranks in processes of their own."""
    ranks = importlib.import_module(part).RANKS
    address = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = os.environ | address | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / "pipeline.py"), part, str(out)]
        processes = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(ranks)]
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks of {part} exited {codes}")
        return read_rows(out)


def main() -> list[Row]:
    """Measure, print the table, write it, and give the rows."""
    rows = [row for part in PARTS for row in rows_of(part)]
    print(table(rows))
    write_rows(RESULTS, rows)
    return rows


if __name__ == "__main__":
    as_rank(sys.argv[1], Path(sys.argv[2]))
