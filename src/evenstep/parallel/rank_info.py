"""Rank and number of ranks of this process, from its environment.

Reads the variables of torchrun, else those of SLURM's `srun`, and torchft's for replaceable processes.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import final

from evenstep.errors import ArgumentError

ADDRESS, NUMBER, COUNT = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"  # torchft's names
ATTEMPT = "_EVENSTEP_ATTEMPT"  # how often a launcher of evenstep's has started this rank again
LAUNCHER = "_EVENSTEP_LAUNCHER"  # the process id of evenstep's launcher, whose children its ranks are
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below Linux's ephemeral ports


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank of one process in a run."""

    rank: int
    ranks: int
    local_rank: int = 0  # among the ranks of this machine
    address: str = "localhost"  # the machine of rank 0
    port: int = 0  # at which the ranks meet there
    store_is_served: bool = False  # by the launcher at that port; else by rank 0
    attempt: int = 0  # number of restarts by the launcher; only ranks of one attempt meet

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


def elastic_rank_of(environ: Mapping[str, str]) -> RankInfo | None:
    """The place of a process that may be lost and come back, in torchft's own names; None where there is none.

    Its address is that of the lighthouse, and its rank a number that it keeps when it comes back.
    """
    if ADDRESS not in environ or NUMBER not in environ:
        return None
    count = _number(environ, COUNT, least=1)
    return RankInfo(rank=_number(environ, NUMBER, below=count), ranks=count, address=environ[ADDRESS])


def rank_info_of(environ: Mapping[str, str]) -> RankInfo | None:
    """The place that the environment gives to this process; None where it was started alone."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
            return None
        environ = _from_slurm(environ)
    ranks = _number(environ, "WORLD_SIZE", least=1)
    rank = _number(environ, "RANK", below=ranks)
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0
    if ranks == 1:
        return RankInfo(rank=rank, ranks=ranks, local_rank=local_rank)
    return RankInfo(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        address=_given(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT", least=1),
        store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, RESTARTS) if RESTARTS in environ else 0,
    )


def is_launched() -> bool:
    return rank_info_of(os.environ) is not None or elastic_rank_of(os.environ) is not None


def is_restarted() -> bool:
    counts = [os.environ.get(name, "0") for name in (ATTEMPT, RESTARTS)]
    return is_launched() and any(count.isdecimal() and int(count) > 0 for count in counts)


def _from_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # jobs on one node have different numbers, so their ports nearly always differ
    place = int(environ.get("SLURM_JOB_ID", 0)) * 7 + int(environ.get("SLURM_STEP_ID", 0))
    names = {"WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}
    own = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    return {
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(FIRST_PORT + place % NUM_PORTS),
        **own,
        **{name: environ.get(theirs, "") for name, theirs in names.items()},
    }


def first_host(nodes: str) -> str:
    """The first machine of a list as SLURM writes it.

    >>> first_host("gpu[003-005,9],login"), first_host("a1,a2"), first_host("r[1-2]n[07-08]-ib")
    ('gpu003', 'a1', 'r1n07-ib')
    """
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes)
    return first.partition(",")[0].strip()


def _given(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise ArgumentError(
            f"a rank among several needs {name} in its environment; start it with torchrun, `--launch.ranks` or srun."
        )
    return value


def _number(environ: Mapping[str, str], name: str, *, least: int = 0, below: float = inf) -> int:
    value = _given(environ, name)
    if not value.isdecimal() or not least <= int(value) < below:
        wanted = f"at least {least}" if below == inf else f"at least {least} and below the {below} processes"
        raise ArgumentError(
            f"{name} in the environment must be a whole number of {wanted}, but is '{value}'; start the run with a "
            f"launcher that sets it, such as torchrun."
        )
    return int(value)
