"""Starts a benchmark's ranks as processes of this machine, and puts together what they measured.

Each rank runs the benchmark's own file with RANK and so on in its environment, as torchrun would start it. What is
measured is the benchmark's to say.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evenstep.parallel import Processes
from harness.rounds import Lane, Train
from harness.row import Row, Times, counted, read_rows, write_rows
from harness.wire import Wire
from harness.work import Work

TIMEOUT_S = 1800


def on_ranks(script: Path, arguments: Sequence[str], *, ranks: int, python: Path = Path(sys.executable)) -> list[Row]:
    """Run `script` once per rank, with `--out` for the rows that the first of them writes; gives those.

    Raises:
        RuntimeError: a rank failed.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [str(python), str(script.resolve()), "--out", str(out), *arguments]
        processes = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks of {script.name} {' '.join(arguments)} ended with {codes}")
        return read_rows(out)


def one_rank(parser: argparse.ArgumentParser, measure: Callable[[Processes, argparse.Namespace], list[Row]]) -> None:
    """What each rank does: measure, and let the first write the rows."""
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=300)
    rows = measure(group, arguments)
    if group.rank == 0:
        write_rows(arguments.out, rows)
    group.gather(None)  # nobody leaves before all are done
    group.close()


def over_ranks(everybody: Sequence[Mapping[str, Times]]) -> dict[str, Times]:
    """Of each contender's rounds the mean processor time over ranks, and the longest time on the wall.

    >>> over_ranks([{"a": Times([1.0], [2.0])}, {"a": Times([3.0], [5.0])}])
    {'a': Times(cpu_s=[2.0], wall_s=[5.0])}
    """
    return {
        name: Times(
            [sum(each) / len(each) for each in zip(*(times[name].cpu_s for times in everybody), strict=True)],
            [max(each) for each in zip(*(times[name].wall_s for times in everybody), strict=True)],
        )
        for name in everybody[0]
    }


def sent(name: str, train: Train, work: Work, updates: int) -> Mapping[tuple[str, torch.dtype], float]:
    """What a contender gives to collectives per update, in bytes, without what is said only once."""
    once, twice = (_counted(name, train, work, count) for count in (updates, 2 * updates))
    return {key: (twice[key] - once[key]) / updates for key in twice}


def bytes_rows(
    contenders: Mapping[str, Train],
    work: Work,
    updates: int,
    *,
    reference: str,
    tensors: str,
    bounds: Mapping[str, float],
) -> list[Row]:
    """What each contender gives to all-reduces in the format of the model per update, and what to collectives in all.

    Args:
        updates: over how many it is counted.
        reference: the contender whose bytes all are divided by.
        tensors: what is sent in that format, such as "gradients".
        bounds: of the ratio of those, by contender.
    """
    dtype = next(work.model.parameters()).dtype
    each = {name: sent(name, train, work, updates) for name, train in contenders.items()}
    of_tensors = {name: one.get(("allreduce", dtype), 0.0) for name, one in each.items()}
    everything = {name: sum(one.values()) for name, one in each.items()}
    row = partial(counted, reference=reference, unit="B/update")
    return [
        *row(f"{work.name}: {tensors} on the wire", of_tensors, bounds=bounds),
        *row(f"{work.name}: all messages on the wire", everything, bounds={}),
    ]


def _counted(name: str, train: Train, work: Work, updates: int) -> Mapping[tuple[str, torch.dtype], int]:
    wire = Wire()

    def watched(model: Any, feed: Any, work: Work) -> list[float]:
        with wire:
            return train(model, feed, work)

    lane = Lane(name, watched, work, [updates])
    lane.start()
    lane.finish()
    return wire.bytes
