"""Starts the ranks that a run asks for, each with the same command, where this process is none of them yet.

How they are started and watched is in `launch` and `contrib.elastic`; it decides only whether, and which of the two.
"""

import ctypes
import os
import signal
import sys
from functools import partial
from pathlib import Path

from evenstep.cli.launch import launch
from evenstep.config.schema import Config
from evenstep.config.schema_ranks import SlurmTable
from evenstep.extras.slurm import Job, submit
from evenstep.lazy import load
from evenstep.parallel.rank_info import LAUNCHER, is_launched
from evenstep.process import EXIT_DONE

_PR_SET_PDEATHSIG = 1


def start_ranks(config: Config, arguments: list[str], *, ranks: int = 0, restarts: bool = True) -> int | None:
    """Run `evenstep` with `arguments` as the ranks of a run; gives their exit code, or None to go on as one of them.

    Args:
        ranks: how many; those of the run by default.
        restarts: whether they are started again after a failure, as the run says.
    """
    if is_launched():
        end_with_parent()
        return None
    ranks = ranks or max(config.launch.ranks, config.parallel.pipeline)
    if ranks == 1 and not (restarts and config.launch.max_restarts):
        return None
    start = launch
    if config.failures.lost_rank == "continue":
        start = partial(load("evenstep.contrib.elastic:launch_elastic"), timeout_s=config.parallel.timeout_s)
    return start(ranks, arguments, max_restarts=config.launch.max_restarts if restarts else 0)


def submit_run(slurm: SlurmTable, arguments: list[str], *, name: str, folder: Path) -> int:
    """Submit a job of SLURM whose ranks run `evenstep` with `arguments`, and say its number; gives the exit code."""
    number = submit(Job(**slurm.model_dump()), arguments, name=name, folder=folder)
    print(f"job         {number}: {slurm.nodes} × {slurm.ranks_per_node} ranks; what they say is in {folder}")
    return EXIT_DONE


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends, on Linux, which alone tells.

    A rank whose launcher is gone saves and stops then, as if a scheduler had asked: nobody else would stop it.
    """
    if sys.platform != "linux":
        return
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        signal.raise_signal(signal.SIGTERM)
