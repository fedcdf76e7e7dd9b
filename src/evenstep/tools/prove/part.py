"""Runs a variant in processes of its own: several ranks, or a run that is killed."""

import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from evenstep.cli.launch import end_with_parent
from evenstep.config.load import Setting
from evenstep.config.ranks import joined
from evenstep.config.target import open_run
from evenstep.errors import EvenstepError, LostRankError, MissingExtraError, clause
from evenstep.events import Hook, UpdateEvent
from evenstep.parallel import Group
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.runs import KillAt, run_once
from evenstep.tools.prove.subject import Ended, RefusedError, Variant
from evenstep.tools.prove.trace import MicrobatchTrace, UpdateTrace, traced


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Work of the processes.

    Args:
        given: settings of the user.
        tokens: budgets of batches by tokens, see `RunFileBench`.
        traces: give the trace of the last update, instead of the result.
    """

    path: Path
    given: Sequence[Setting]
    variant: Variant
    updates: int
    folder: Path | None = None
    kill_at: int | None = None
    traces: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])


@final
class Elsewhere:
    """Runs variants of a run file in processes of their own; see `InProcesses`."""

    def __init__(self, path: Path, given: Sequence[Setting], tokens: Mapping[str, int]) -> None:
        self._path, self._given, self._tokens = path, given, dict(tokens)

    def __call__(
        self, variant: Variant, *, updates: int, folder: Path | None = None, kill_at: int | None = None
    ) -> Ended | None:
        return self._run(variant, updates=updates, folder=folder, kill_at=kill_at)

    def traced(self, variant: Variant, update: int) -> UpdateTrace:
        return self._run(variant, updates=update, traces=True)

    def _run(self, variant: Variant, **more: Any) -> Any:
        part = Part(path=self._path, given=self._given, variant=variant, tokens=self._tokens, **more)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(variant.ranks)]
        processes = [
            context.Process(target=_be_rank, args=(part, rank, port, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, pipe in zip(processes, pipes, strict=True):
                process.start()
                pipe[1].close()
            answers = [_received(pipe[0]) for pipe in pipes]
            for process in processes:
                process.join()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        if part.kill_at is not None and processes[0].exitcode == -signal.SIGKILL:
            return None
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            raise next((error for error in errors if isinstance(error, RefusedError)), errors[0])
        return answers[0]


def _received(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return EvenstepError("a process of this row has ended without an answer.")


@final
class _Began(Hook):
    is_true = False

    def before_update(self, event: UpdateEvent) -> None:
        self.is_true = True


def _be_rank(part: Part, rank: int, port: int, pipe: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to report
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    if part.variant.ranks > 1:
        place = {"RANK": rank, "WORLD_SIZE": part.variant.ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in place.items()} | {"MASTER_ADDR": "localhost"}
    began = _Began()
    try:
        answer = _work(part, began)
    except Exception as error:  # noqa: BLE001 - reported by the parent
        answer = error if isinstance(error, MissingExtraError) else EvenstepError(clause(error))
        is_refusal = isinstance(error, EvenstepError) and not isinstance(error, LostRankError | MissingExtraError)
        if is_refusal and not (part.traces or began.is_true):  # the variant is impossible
            answer = RefusedError(str(error))
    pipe.send_bytes(pickle.dumps(answer))


def _work(part: Part, began: _Began) -> Ended | UpdateTrace | None:
    with open_run(part.path, RunFileBench(part.path, part.given, part.tokens).settings(part.variant)) as opened:
        config = opened.config
    with joined(config) as group:
        bench = RunFileBench(part.path, part.given, part.tokens, group)
        if part.traces:
            made = _traced_on_all(bench, part, group)
        else:
            hooks: list[Hook] = [began] if part.kill_at is None else [began, KillAt(part.kill_at)]
            made = run_once(
                bench.open, part.variant, updates=part.updates, hooks=lambda subject: hooks, folder=part.folder
            )
        group.gather(None)
    return made if group.rank == 0 else None


def _traced_on_all(bench: RunFileBench, part: Part, group: Group) -> UpdateTrace:
    trace = traced(bench.open, part.variant, part.updates)
    everybody: list[list[MicrobatchTrace]] = group.gather(trace.microbatches)
    microbatches = sorted((one for theirs in everybody for one in theirs), key=lambda one: one.index)
    return replace(trace, microbatches=microbatches)
