"""Starts the ranks of a run: as processes of this machine, or as the tasks of a SLURM job.

Ranks that fail are started again from their newest checkpoint: all together, or the lost one alone where the others go
on (`launch.lost_rank`). Across machines without SLURM, start `evenstep train` with torchrun instead.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, final

from evenstep.config.load import OpenRun, refused_at
from evenstep.config.run import RunConfig, SlurmTable
from evenstep.errors import ArgumentError, ConfigError, EvenstepError, clause
from evenstep.lazy import load, load_optional
from evenstep.parallel import Group, Processes, device_of_rank, rank_info_of
from evenstep.parallel.rank_info import (
    ADDRESS,
    ATTEMPT,
    COUNT,
    FIRST_PORT,
    LAUNCHER,
    NUM_PORTS,
    NUMBER,
    RESTARTS,
    RankInfo,
    elastic_rank_of,
    is_launched,
)
from evenstep.process import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE, FINAL, REQUEUE, command, heeded

_LONGEST_PAUSE_S = 30.0
_FORWARDED = (*REQUEUE, signal.SIGINT, signal.SIGQUIT)
_GRACE_S = 300.0  # for the update and the save between a signal and the end
_LEAVE_S = 5.0  # for the others, when rank 0 has ended
_LOOK_EVERY_S = 0.02
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its launcher ends, so that the run saves and stops."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the launcher ended before this call
        signal.raise_signal(signal.SIGTERM)


def on_ranks(run: OpenRun, arguments: list[str], work: Callable[[Group], int], *, restarts: bool = True) -> int:
    """Start the ranks of a run with a command line, or do the work of one of them; gives the exit code.

    With `restarts` ranks are started again after a failure, as often as the run file says.
    """
    table, parallel = run.config.launch, run.config.parallel
    ranks = max(table.ranks, parallel.pipeline)
    max_restarts = table.max_restarts if restarts else 0
    if is_launched():
        end_with_parent()
    elif ranks > 1 or max_restarts:
        may_lose = table.lost_rank == "continue"
        serving = load("evenstep.contrib.elastic:lighthouse")(parallel.timeout_s) if may_lose else nullcontext("")
        with serving as lighthouse:
            return launch(ranks, arguments, max_restarts=max_restarts, lighthouse=lighthouse)
    with joined(run.config) as group:
        code = work(group)
        group.gather(code)  # a rank that ends before the others looks like one that has failed
    return code


@contextmanager
def joined(config: RunConfig) -> Generator[Group]:
    """The group of all ranks of this run, inside the `with`."""
    info, place = rank_info_of(os.environ), elastic_rank_of(os.environ)
    is_one_of_several = info is not None and info.ranks > 1
    if config.launch.lost_rank == "continue" and (place is not None or is_one_of_several):
        group = _elastic(config, place)
    elif place is not None and place.ranks > 1:
        raise ConfigError('`launch.lost_rank` must be "continue" for a process with REPLICA_GROUP_ID; set it.')
    elif is_one_of_several:
        with refused_at("device"):
            group = Processes(device_of_rank(config.device), timeout_s=config.parallel.timeout_s)
    else:
        group = Group()
    try:
        yield group
    except BaseException as error:
        group.fail(clause(error))
        raise
    finally:
        group.close()


def _elastic(config: RunConfig, place: RankInfo | None) -> Group:
    if place is None or device_of_rank(config.device).type != "cpu":
        raise ConfigError(
            '`launch.lost_rank` "continue" is for CPUs and for ranks that `--launch.ranks` starts; use "stop".'
        )
    elastic = import_module("evenstep.contrib.elastic")
    return elastic.Elastic(elastic.Lighthouse(place), timeout_s=config.parallel.timeout_s)


def launch(ranks: int, arguments: list[str], *, max_restarts: int = 0, lighthouse: str = "") -> int:
    """Run `evenstep` with `arguments` as several processes on this machine.

    Gives the exit code of the first rank that failed, as the others only fail because of it; with a `lighthouse`, the
    address at which ranks that may be lost find each other, the one of rank 0.
    """
    started = _Ranks(ranks, arguments, lighthouse)
    print(f"ranks       {ranks} on this machine; logs of all but the first in {started.logs}", flush=True)
    before = {number: signal.signal(number, started.forward) for number in heeded(_FORWARDED)}
    try:
        return started.run_apart(max_restarts) if lighthouse else started.run_together(max_restarts)
    finally:
        started.stop(0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class _Ranks:
    """The processes of a run. Rank 0 writes to this console, the others to files."""

    def __init__(self, count: int, arguments: list[str], lighthouse: str) -> None:
        self.logs = Path(tempfile.mkdtemp(prefix="evenstep-ranks-"))
        self._count = count
        self._command = [*command(), *arguments]
        self._environ = os.environ | {LAUNCHER: str(os.getpid())}
        if lighthouse:
            self._environ |= {ADDRESS: lighthouse, COUNT: str(count)}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._signal = 0
        self._deadline = 0.0

    def run_together(self, max_restarts: int) -> int:
        for attempt in range(max_restarts + 1):
            code = self._attempt(attempt)
            if code in FINAL or self._signal or attempt == max_restarts:
                return code
            print(f"restart     {attempt + 1} of {max_restarts}, from the newest checkpoint", flush=True)
            sleep(min(2.0**attempt, _LONGEST_PAUSE_S))
        raise AssertionError("the last attempt returns")

    def _attempt(self, attempt: int) -> int:
        from evenstep.internals import TCPStore

        store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        shared = {"WORLD_SIZE": str(self._count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", RESTARTS: str(attempt)}
        for rank in range(self._count):
            self._start(rank, attempt, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        while not self._ended():
            failed = [rank for rank, process in self._processes.items() if process.poll()]
            if failed and not self._signal:
                return self._failed(failed[0])
            sleep(_LOOK_EVERY_S)
        failed = [rank for rank, process in self._processes.items() if process.returncode]
        if not self._signal:
            return self._failed(failed[0]) if failed else EXIT_DONE
        # a run that was done, or could not be saved, must not be started again
        code = self._processes[0].returncode
        if code >= 0:
            return code
        if self._signal == signal.SIGINT:
            return EXIT_INTERRUPTED
        return EXIT_REQUEUE if self._signal in REQUEUE else EXIT_ERROR

    def _failed(self, rank: int) -> int:
        code = self._processes[rank].returncode
        self.stop(_GRACE_S)
        if rank and code not in (EXIT_REQUEUE, EXIT_INTERRUPTED):
            print(f"evenstep: rank {rank} failed first: {self._last_message(rank)}", file=sys.stderr)
        return code if code > 0 else EXIT_ERROR

    def run_apart(self, restarts_left: int) -> int:
        attempts = dict.fromkeys(range(self._count), 0)
        for number in attempts:
            self._start(number, 0, {NUMBER: str(number)})
        over: set[int] = set()
        while 0 not in over or not (self._processes[0].returncode in FINAL or len(over) == self._count):
            for number in attempts.keys() - over:
                code = self._processes[number].poll()
                if code is None:
                    continue
                if code in FINAL or self._signal or not restarts_left:
                    over.add(number)
                    if code not in FINAL and (number or code < 0):  # rank 0 has written its error to this console
                        where = self._last_message(number) if number else "it keeps the run folder."
                        print(f"evenstep: rank {number} is lost: {where}", file=sys.stderr)
                    continue
                restarts_left -= 1
                attempts[number] += 1
                print(f"restart     rank {number}, {restarts_left} more", flush=True)
                self._start(number, attempts[number], {NUMBER: str(number)})
            sleep(_LOOK_EVERY_S)
        self.stop(_LEAVE_S, asks=False)
        code = self._processes[0].returncode
        return code if code >= 0 else EXIT_ERROR

    def _start(self, rank: int, attempt: int, own: dict[str, str]) -> None:
        environ = self._environ | own | {ATTEMPT: str(attempt)}
        with (self.logs / f"rank-{rank}.log").open("ab") if rank else nullcontext() as log:
            self._processes[rank] = subprocess.Popen(
                self._command, env=environ, stdout=log, stderr=subprocess.STDOUT if rank else None
            )
        if self._signal:  # which came while ranks were started
            self._processes[rank].send_signal(self._signal)

    def _ended(self) -> bool:
        if self._signal and monotonic() > self._deadline:
            self.stop(0.0)
        return all(process.poll() is not None for process in self._processes.values())

    def _last_message(self, rank: int) -> str:
        file = self.logs / f"rank-{rank}.log"
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("evenstep:")]
        said = f"{lines[-1].removeprefix('evenstep: ')} " if lines else ""
        return f"{said}Its log: {file}."

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._deadline = monotonic() + _GRACE_S
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def stop(self, grace_s: float, *, asks: bool = True) -> None:
        """Terminate the running processes, and kill them after `grace_s` seconds."""
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running if asks and grace_s else ():
            process.terminate()
        until = monotonic() + grace_s
        while monotonic() < until and any(process.poll() is None for process in running):
            sleep(_LOOK_EVERY_S)
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


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
    """Environment variables of a rank, from submitit's description of its task."""
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
            # not `wait`, whose lock `__call__` may hold; `__call__` reaps the process
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return load_optional("submitit", "slurm").helpers.DelayedSubmission(self)
