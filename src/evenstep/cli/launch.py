"""Starts the ranks of a run on this machine, through torch's own elastic launcher, and gives their exit code.

Ranks that fail are started again together, as often as the run allows: from their newest checkpoint, with a rendezvous
of their own, so that nothing of the failed attempt is in the way. Rank 0 speaks on this console; what the others say
goes to files that are named if one of them fails first. Across machines, start `evenstep train` with torchrun instead;
a rank does not know which of the two has started it.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from signal import SIGINT, SIGQUIT, getsignal, signal
from time import sleep
from typing import Any

from evenstep.parallel.rank_info import ATTEMPT, LAUNCHER
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
_FORWARDED = (*REQUEUE, SIGINT, SIGQUIT)
_GRACE_S = 300  # for the update and the save between a signal and the end


def launch(ranks: int, arguments: list[str], *, max_restarts: int = 0, silent: bool = False) -> int:
    """Run `evenstep` with `arguments` as `ranks` processes.

    Args:
        silent: whether what rank 0 says goes to a file as well.
        max_restarts: how many times all are started again after one has failed.

    Returns:
        The exit code of the first rank that failed, as the others only fail because of it.
    """
    for attempt in range(max_restarts + 1):
        os.environ[ATTEMPT] = str(attempt)
        code = _attempt(ranks, arguments, range(0 if silent else 1, ranks))
        if code in FINAL or attempt == max_restarts:
            return code
        print(f"restart     {attempt + 1} of {max_restarts}, from the newest checkpoint", flush=True)
        sleep(min(2.0**attempt, _LONGEST_PAUSE_S))  # what fails at once should not be tried without pause
    raise AssertionError("the last attempt returns")


def _attempt(ranks: int, arguments: list[str], silent: Iterable[int]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    before = {number: getsignal(number) for number in _FORWARDED}
    logs = Path(tempfile.mkdtemp(prefix="evenstep-ranks-"))
    os.environ[CODE_FILE] = str(logs / "exit-code")
    # torch forgets ranks that it is just starting when a signal comes, and they are in sessions of their own
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        return _ended(ranks, arguments, logs, silent)
    except SignalException as error:  # one more, while the end by the first was being said
        return _code_of(error.sigval)
    finally:  # torch leaves its handlers, whose error would end this command in the midst of its own end
        for number, handler in before.items():
            signal(number, handler)


def _ended(ranks: int, arguments: list[str], logs: Path, silent: Iterable[int]) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher logs every ending of a rank as an error with a table, and signals; what matters is said below.
    for name in [one for one in logging.root.manager.loggerDict if one.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own
    # torch 2.11 can't be told, and gives them half a minute
    knows_grace = "shutdown_timeout" in signature(LaunchConfig).parameters
    grace: dict[str, Any] = {"shutdown_timeout": _GRACE_S} if knows_grace else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in heeded(_FORWARDED)),
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(silent, Std.ALL)),
        **grace,
    )
    print(f"ranks       {ranks} on this machine; what all but the first say is in {logs}", flush=True)
    try:
        python, *first = command()
        elastic_launch(config, python)(*first, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if rank and failure.exitcode not in (EXIT_REQUEUE, EXIT_INTERRUPTED):
            print(f"evenstep: rank {rank} failed first: {_last_words(logs, rank)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else EXIT_ERROR
    except SignalException as error:
        return _code_of(error.sigval)
    return EXIT_DONE


def _code_of(number: int) -> int:
    """The exit code of ranks that a signal has ended, unless the first has ended otherwise.

    A run that was found done must not go on, and one that could not be saved is not to be started again unseen.
    """
    code = Path(os.environ[CODE_FILE])
    own = code.read_text(encoding="utf-8") if code.is_file() else ""
    for otherwise in (EXIT_DONE, EXIT_ERROR, EXIT_CONFIG):
        if own == str(otherwise):
            return otherwise
    return EXIT_INTERRUPTED if number == SIGINT else EXIT_REQUEUE if number in REQUEUE else EXIT_ERROR


def _last_words(logs: Path, rank: int) -> str:
    for file in sorted(logs.rglob(f"{rank}/stderr.log")):
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("evenstep:")]
        if lines:
            return f"{lines[-1].removeprefix('evenstep: ')} All that it said is in {file}."
    return f"it left no word; see {logs}."
