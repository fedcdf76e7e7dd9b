"""Starts the ranks of a run on this machine, through torch's own elastic launcher, and gives their exit code.

Rank 0 speaks on this console; what the others say goes to files that are named if one of them fails first. Across
machines, start `evenstep train` with torchrun instead; a rank does not know which of the two has started it.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path
from signal import SIGINT, SIGTERM

from evenstep.cli.exits import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE
from evenstep.parallel import place_of


def is_rank() -> bool:
    """Whether this process is a rank already, started here, by torchrun or by srun."""
    return place_of(os.environ) is not None


def launch(ranks: int, arguments: list[str]) -> int:
    """Run `evenstep` with `arguments` as `ranks` processes.

    Returns:
        The exit code of the first rank that failed, as the others only fail because of it.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher logs every ending of a rank as an error with a table; what matters is said below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = Path(tempfile.mkdtemp(prefix="evenstep-ranks-"))
    others = dict.fromkeys(range(1, ranks), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=others),
    )
    print(f"ranks       {ranks} on this machine; what all but the first say is in {logs}", flush=True)
    try:
        elastic_launch(config, sys.executable)("-m", "evenstep", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if rank and failure.exitcode not in (EXIT_REQUEUE, EXIT_INTERRUPTED):
            print(f"evenstep: rank {rank} failed first: {_last_words(logs, rank)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else EXIT_ERROR
    except SignalException as error:
        return {SIGTERM: EXIT_REQUEUE, SIGINT: EXIT_INTERRUPTED}.get(error.sigval, EXIT_ERROR)
    return EXIT_DONE


def _last_words(logs: Path, rank: int) -> str:
    for file in sorted(logs.rglob(f"{rank}/stderr.log")):
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("evenstep:")]
        if lines:
            return f"{lines[-1].removeprefix('evenstep: ')} All that it said is in {file}."
    return f"it left no word; see {logs}."
