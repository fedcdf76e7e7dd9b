"""Starts the ranks of a run: on this machine by torch's elastic launcher, or as the tasks of a SLURM job.

Ranks that fail are started again together from their newest checkpoint, with a rendezvous of their own. Rank 0 writes
to this console, the others to files. Across machines without SLURM, start `evenstep train` with torchrun instead.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from time import sleep
from typing import Any, final

from evenstep.config.run import RunConfig, SlurmTable
from evenstep.errors import ArgumentError, EvenstepError
from evenstep.lazy import load, load_optional
from evenstep.parallel.rank_info import ATTEMPT, FIRST_PORT, LAUNCHER, NUM_PORTS, is_launched
from evenstep.process import (
    CODE_FILE,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    FINAL,
    REQUEUE,
    command,
    heeded,
)

_LONGEST_PAUSE_S = 30.0
_FORWARDED = (*REQUEUE, signal.SIGINT, signal.SIGQUIT)
_GRACE_S = 300  # for the update and the save between a signal and the end
_PR_SET_PDEATHSIG = 1


def start_ranks(config: RunConfig, arguments: list[str], *, restarts: bool = True) -> int | None:
    """Run `evenstep` with `arguments` as the ranks of a run.

    Args:
        restarts: start ranks again after a failure, as often as the run file says.

    Returns:
        The exit code of the ranks, or None in a process that is one of them or the only one.
    """
    if is_launched():
        end_with_parent()
        return None
    ranks = max(config.launch.ranks, config.parallel.pipeline)
    max_restarts = config.launch.max_restarts if restarts else 0
    if ranks == 1 and not max_restarts:
        return None
    start = launch
    if config.launch.lost_rank == "continue":
        start = partial(load("evenstep.contrib.elastic:launch_elastic"), timeout_s=config.parallel.timeout_s)
    return start(ranks, arguments, max_restarts=max_restarts)


def end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its launcher ends, so that the run saves and stops."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the launcher ended before this call
        signal.raise_signal(signal.SIGTERM)


def launch(ranks: int, arguments: list[str], *, max_restarts: int = 0) -> int:
    """Run `evenstep` with `arguments` as several processes on this machine.

    Args:
        max_restarts: number of times that all ranks are started again after one has failed.

    Returns:
        The exit code of the first rank that failed, as the others only fail because of it.
    """
    try:
        for attempt in range(max_restarts + 1):
            os.environ[ATTEMPT] = str(attempt)
            code = _attempt(ranks, arguments)
            if code in FINAL or attempt == max_restarts:
                return code
            print(f"restart     {attempt + 1} of {max_restarts}, from the newest checkpoint", flush=True)
            sleep(min(2.0**attempt, _LONGEST_PAUSE_S))
        raise AssertionError("the last attempt returns")
    finally:
        for name in (ATTEMPT, CODE_FILE, LAUNCHER):  # later processes of this one are no ranks
            os.environ.pop(name, None)


def _attempt(ranks: int, arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    logs = Path(tempfile.mkdtemp(prefix="evenstep-ranks-"))
    os.environ[CODE_FILE] = str(logs / "exit-code")
    os.environ[LAUNCHER] = str(os.getpid())  # torch forgets ranks that it is starting when a signal comes
    try:
        return _ended(ranks, arguments, logs)
    except SignalException as error:  # a second signal, while the first one ended the ranks
        return _code_of(error.sigval)
    finally:  # torch leaves its handlers in place
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(ranks: int, arguments: list[str], logs: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:  # it logs the end of each rank as an error with a table
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    has_grace = "shutdown_timeout" in signature(LaunchConfig).parameters  # not in torch 2.11
    grace: dict[str, Any] = {"shutdown_timeout": _GRACE_S} if has_grace else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in heeded(_FORWARDED)),
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
        **grace,
    )
    print(f"ranks       {ranks} on this machine; logs of all but the first: {logs}", flush=True)
    try:
        python, *first = command()
        elastic_launch(config, python)(*first, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if rank and failure.exitcode not in (EXIT_REQUEUE, EXIT_INTERRUPTED):
            print(f"evenstep: rank {rank} failed first: {_last_message(logs, rank)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else EXIT_ERROR
    except SignalException as error:
        return _code_of(error.sigval)
    return EXIT_DONE


def _code_of(number: int) -> int:
    """The exit code of ranks that a signal has ended.

    Rank 0 leaves its own code in a file. A run that was done, or could not be saved, must not be started again.
    """
    file = Path(os.environ[CODE_FILE])
    own = file.read_text(encoding="utf-8") if file.is_file() else ""
    for code in (EXIT_DONE, EXIT_ERROR, EXIT_CONFIG):
        if own == str(code):
            return code
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_REQUEUE if number in REQUEUE else EXIT_ERROR


def _last_message(logs: Path, rank: int) -> str:
    for file in sorted(logs.rglob(f"{rank}/stderr.log")):
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("evenstep:")]
        if lines:
            return f"{lines[-1].removeprefix('evenstep: ')} Its log: {file}."
    return f"no message; logs: {logs}."


def submit_run(slurm: SlurmTable, arguments: list[str], *, name: str, folder: Path) -> int:
    """Submit a SLURM job whose tasks run `evenstep` with `arguments`, and print its number; gives the exit code."""
    submitit = load_optional("submitit", "slurm")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ArgumentError(
            "`launch.slurm` needs the commands `sbatch` and `srun`, which this machine does not have; call it on a "
            "login node of the cluster, or start ranks here with `--launch.ranks`.",
            field="launch.slurm",
        )
    job = submit_to(submitit.AutoExecutor(folder=folder, cluster="slurm"), slurm, arguments, name=name)
    print(f"job         {job.job_id}: {slurm.nodes} × {slurm.ranks_per_node} ranks; logs in {folder}")
    return EXIT_DONE


def submit_to(executor: Any, slurm: SlurmTable, arguments: list[str], *, name: str) -> Any:
    """Submit to any executor of submitit; gives its job."""
    executor.update_parameters(
        name=name,
        nodes=slurm.nodes,
        tasks_per_node=slurm.ranks_per_node,
        timeout_min=slurm.timeout_minutes,
        slurm_additional_parameters=slurm.additional,
    )
    return executor.submit(Rank([*command(), *arguments]))


def rank_variables(job: Any) -> dict[str, str]:
    """The environment variables of a rank, from submitit's description of its task."""
    number = int("".join(filter(str.isdigit, str(job.job_id))) or 0)
    return {
        "RANK": str(job.global_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_RANK": str(job.local_rank),
        "MASTER_ADDR": "localhost" if job.num_nodes == 1 else str(job.hostnames[0]),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(FIRST_PORT + number * 7 % NUM_PORTS),
    }


@final
@dataclass(slots=True)
class Rank:
    """One task of a SLURM job, which runs one rank. submitit stores it in a file and calls it on the machine.

    When SLURM warns before the time limit, the rank saves and exits with 75; then the job is queued again.
    """

    command: list[str]
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)

    def __call__(self) -> None:
        """Run the rank to its end."""
        job = load_optional("submitit", "slurm").JobEnvironment()
        self._process = subprocess.Popen(self.command, env=os.environ | rank_variables(job))
        code = self._process.wait()
        if code == EXIT_REQUEUE and job.global_rank == 0 and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        if code not in (EXIT_DONE, EXIT_REQUEUE):
            raise EvenstepError(f"rank {job.global_rank} ended with exit code {code}; see its message above.")

    def checkpoint(self) -> Any:
        """End the rank and submit it again; submitit calls this in a signal handler."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            # not `wait`, whose lock `__call__` may hold; that one reaps the process
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return load_optional("submitit", "slurm").helpers.DelayedSubmission(self)
