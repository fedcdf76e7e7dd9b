"""Spawns processes for runs on several ranks, and for runs that are killed."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from evenstep.cli.launch import end_with_parent
from evenstep.config.load import Setting
from evenstep.config.ranks import joined
from evenstep.errors import EvenstepError, LostRankError, clause
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.run import Ended, KilledError, RefusedError, Variant, run_once
from evenstep.tools.prove.trace import MicrobatchTrace


@final
@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Makes runs of a run file as `run_once` does, in one new process for each rank."""

    path: Path
    given: Sequence[Setting]
    tokens: Mapping[str, int]

    def __call__(self, variant: Variant, /, **options: Any) -> Ended:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        with ProcessPoolExecutor(variant.ranks, multiprocessing.get_context("spawn")) as pool:
            try:
                ranks = [pool.submit(_be_rank, self, variant, options, rank, port) for rank in range(variant.ranks)]
                answers = [rank.result() for rank in ranks]
            except BrokenProcessPool as error:
                if "kill_at" in options:
                    raise KilledError("it was killed.") from error
                raise EvenstepError("a process of this row has ended without an answer.") from error
            except BaseException:  # Ctrl-C
                for process in multiprocessing.active_children():
                    process.kill()
                raise
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            raise next((error for error in errors if isinstance(error, RefusedError)), errors[0])
        return answers[0]


def _be_rank(elsewhere: Elsewhere, variant: Variant, options: Mapping[str, Any], rank: int, port: int) -> Any:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to report
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    if variant.ranks > 1:
        place = {"RANK": rank, "WORLD_SIZE": variant.ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in place.items()} | {"MASTER_ADDR": "localhost"}
    began: list[bool] = []
    try:
        made = _run(elsewhere, variant, options, began)
    except Exception as error:  # noqa: BLE001 - reported by the parent; some errors can't be pickled
        is_refusal = isinstance(error, EvenstepError) and not isinstance(error, LostRankError) and not began
        return RefusedError(str(error)) if is_refusal else EvenstepError(clause(error))
    return made if rank == 0 else None


def _run(elsewhere: Elsewhere, variant: Variant, options: Mapping[str, Any], began: list[bool]) -> Ended:
    bench = RunFileBench(elsewhere.path, elsewhere.given, elsewhere.tokens)
    with joined(bench.config_of(variant)) as bench.group:
        made = run_once(bench.open, variant, began=lambda: began.append(True), **options)
        if made.trace is None:
            bench.group.gather(None)
            return made
        everybody: list[list[MicrobatchTrace]] = bench.group.gather(made.trace.microbatches)
    microbatches = sorted((one for theirs in everybody for one in theirs), key=lambda one: one.number)
    return replace(made, trace=replace(made.trace, microbatches=microbatches))
