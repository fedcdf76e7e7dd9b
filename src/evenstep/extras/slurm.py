"""Submits a run to SLURM through submitit.

Each task of the job starts one rank. When SLURM warns, the run saves itself and exits with 75; then it is requeued.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any, final

from evenstep.errors import ArgumentError, EvenstepError
from evenstep.lazy import load_optional
from evenstep.parallel.rank_info import FIRST_PORT, NUM_PORTS
from evenstep.process import EXIT_DONE, EXIT_REQUEUE, command


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked of SLURM; None leaves a thing to the cluster.

    Args:
        account: to which the time is charged.
        cpus_per_rank: processor cores.
        gpus_per_rank: accelerators.
        memory_gb: of each machine.
        additional: further options of `sbatch`, by name.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    timeout_minutes: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_rank: int | None = None
    gpus_per_rank: int | None = None
    memory_gb: float | None = None
    additional: Mapping[str, Any] | None = None


def submit(job: Job, arguments: list[str], *, name: str, folder: Path) -> str:
    """Submit a job whose tasks run `evenstep` with `arguments`; returns its number."""
    submitit = load_optional("submitit", "slurm")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ArgumentError(
            "`launch.slurm` submits a job with `sbatch`, but this machine has no SLURM commands; call it on a login "
            "node of the cluster, or start ranks here with `--launch.ranks`.",
            field="launch.slurm",
        )
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    return str(submit_to(executor, job, arguments, name=name).job_id)


def submit_to(executor: Any, job: Job, arguments: list[str], *, name: str) -> Any:
    """Submit to any executor of submitit; gives its job."""
    asked = {
        "slurm_partition": job.partition,
        "slurm_account": job.account,
        "slurm_qos": job.qos,
        "cpus_per_task": job.cpus_per_rank,
        "gpus_per_node": None if job.gpus_per_rank is None else job.gpus_per_rank * job.ranks_per_node,
        "mem_gb": job.memory_gb,
        "slurm_additional_parameters": job.additional or None,
    }
    executor.update_parameters(
        name=name,
        nodes=job.nodes,
        tasks_per_node=job.ranks_per_node,
        timeout_min=job.timeout_minutes,
        **{key: value for key, value in asked.items() if value is not None},
    )
    return executor.submit(Rank([*command(), *arguments]))


def rank_variables(job: Any) -> dict[str, str]:
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
    """What a task of the job does: one rank, from start to end. submitit keeps it in a file and calls it there."""

    command: list[str]
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)

    def __call__(self) -> None:
        """Run to the end of the process."""
        job = load_optional("submitit", "slurm").JobEnvironment()
        self._process = subprocess.Popen(self.command, env=os.environ | rank_variables(job))
        code = self._process.wait()
        if code == EXIT_REQUEUE and job.global_rank == 0 and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        if code not in (EXIT_DONE, EXIT_REQUEUE):
            raise EvenstepError(f"rank {job.global_rank} ended with exit code {code}; see what it said above.")

    def checkpoint(self) -> Any:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(SIGTERM)
            # Not with `wait`, in whose lock this handler may have interrupted `__call__`; that one reaps the process.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return load_optional("submitit", "slurm").helpers.DelayedSubmission(self)
