"""The run of a run file, reduced to minutes on a CPU, in each of the variants that are compared.

The global batch is reduced; a run of updates keeps their number, which the LR schedule counts with.
"""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from evenstep.cli.launch import end_with_parent, joined
from evenstep.config.build import RunParts, build_lr_schedule, build_parts
from evenstep.config.load import OpenRun, Setting, open_run, settings_in
from evenstep.config.run import DataTable
from evenstep.data import Data
from evenstep.data.batching import largest
from evenstep.errors import DataError, EvenstepError, LostRankError, clause
from evenstep.events import Hook
from evenstep.optim.schedules import Plateau
from evenstep.parallel import Group
from evenstep.tools.prove.run import Cut, Ended, RefusedError, Subject, Variant, run_once
from evenstep.tools.prove.trace import Parts
from evenstep.train import Task, Trainer

SAMPLES = 12  # of a global batch: cut in 1, 2, 4 and unevenly
_SHARES: Mapping[Cut, tuple[int, int]] = {"1": (1, 1), "2": (1, 2), "4": (1, 4), "ragged": (5, 12)}
_REDUCED: Mapping[str, object] = {
    "device": "cpu",
    "threads": 1,
    "resume": "never",
    "reset": "none",
    "launch": "none",
    **{f"hooks.{name}": "none" for name in ("early_stop", "profile", "stop_below_lr", "time_budget")},
    "evaluation": "none",
    "checkpoint": "none",
    "checkpoint.asynchronous": "false",
    "log.writers": "[]",
    "train.compile": "off",
    "failures": "none",
    "parallel": "none",
    "train.epochs": "none",
    "limit_batches": "2",  # so that the runs cross the ends of epochs
}
_ENDLESS = 1_000_000  # updates of a run that is as long as some epochs


@final
class RunFileBench:
    """Builds variants of a run file, and runs them in new processes.

    Args:
        given: settings of the user.
        tokens: budgets of the reduced global batches that are cut by tokens, by the key of their data.
    """

    def __init__(self, path: Path, given: Sequence[Setting], tokens: Mapping[str, int]) -> None:
        self._path = path
        self._given = given
        self._tokens = tokens
        self._group = Group()
        with open_run(path, given) as opened:
            self.config = opened.config

    @contextmanager
    def open(self, variant: Variant) -> Generator[Subject]:
        """Build a variant, which is closed at the end of the `with`."""
        with (
            open_run(self._path, self._settings(variant)) as opened,
            closing(build_parts(opened.config, self._group)) as parts,
        ):
            yield _subject(replace(parts, evaluations={}), opened)

    def elsewhere(self, variant: Variant, /, **options: Any) -> Ended:
        """Make a run as `run_once` does, in a new process for each rank; BrokenProcessPool if one was killed."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        bench = self._path, self._given, self._tokens
        with ProcessPoolExecutor(variant.ranks, multiprocessing.get_context("spawn")) as pool:
            try:
                ranks = [pool.submit(_be_rank, bench, variant, options, port, one) for one in range(variant.ranks)]
                answers = [rank.result() for rank in ranks]
            except BaseException as error:
                if not isinstance(error, BrokenProcessPool):  # Ctrl-C
                    for process in multiprocessing.active_children():
                        process.kill()
                raise
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            raise next((error for error in errors if isinstance(error, RefusedError)), errors[0])
        return answers[0]

    def run_as_rank(self, variant: Variant, began: Callable[[], object], options: Mapping[str, Any]) -> Ended:
        with open_run(self._path, self._settings(variant)) as opened:
            config = opened.config
        with joined(config) as self._group:
            made = run_once(self.open, variant, began=began, **options)
            parts: Parts = {}
            for theirs in self._group.gather(made.parts):
                for part, calls in theirs.items():
                    parts[part] = calls | parts.get(part, {})
        return replace(made, parts=parts, states=made.states if variant.ranks == 1 else {})

    def fit_tokens(self) -> None:
        """Choose budgets of batches that are cut by tokens, as small as can be cut in four."""
        budgets = {key: largest(table.global_batch_tokens) for key, table in self.config.sets.items()}
        for times in (1, 2, 4, 8, 16, 32, 64):
            self._tokens = {key: max(4, whole * times // 16) for key, whole in budgets.items() if whole is not None}
            try:
                with self.open(Variant()):
                    return
            except DataError:
                if not self._tokens or times == 64:
                    raise

    def _settings(self, variant: Variant) -> list[Setting]:
        config = self.config
        parallel = config.parallel
        changed = {
            **_REDUCED,
            "parallel.strategy": variant.strategy,
            "parallel.reduction": "ordered",
            "parallel.timeout_s": parallel.timeout_s,
            "launch.ranks": variant.ranks,
            "train.check_loss": str(variant.checks_loss).lower(),
            "train.updates": config.train.updates or _ENDLESS,
        }
        groups = config.optimizer.groups.items()
        schedules = {f"optimizer.groups.{name}.lr_schedule": group.lr_schedule for name, group in groups}
        for key, table in {"lr_schedule": config.lr_schedule, **schedules}.items():
            if isinstance(table, Plateau):  # as it is before the first evaluation
                changed[key] = f'{{kind = "constant", warmup_updates = {table.warmup_updates}}}'
        for key, table in config.sets.items():
            changed[f"{key}.num_workers"] = variant.workers
            changed |= _cut(key, table, variant.cut, self._tokens.get(key, 0))
        if variant.pipeline > 1:
            changed["parallel.pipeline"] = variant.pipeline
            if parallel.pipeline == variant.pipeline:
                changed["parallel.pipeline_schedule"] = parallel.pipeline_schedule
                changed["parallel.split_at"] = str(list(parallel.split_at)).replace("'", '"')
                changed["parallel.stages_per_rank"] = parallel.stages_per_rank or "none"
        if variant.still:
            changed["train.precision"] = "32-true"
        return [*self._given, *settings_in(changed)]


def _be_rank(bench: tuple[Any, ...], variant: Variant, options: Mapping[str, Any], port: int, rank: int) -> Any:
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
        made = RunFileBench(*bench).run_as_rank(variant, lambda: began.append(True), options)
    except Exception as error:  # noqa: BLE001 - reported by the parent; some errors can't be pickled
        is_refusal = isinstance(error, EvenstepError) and not isinstance(error, LostRankError) and not began
        return RefusedError(str(error)) if is_refusal else EvenstepError(clause(error))
    return made if rank == 0 else None


def _cut(key: str, table: DataTable, cut: Cut, tokens: int) -> dict[str, object]:
    up, down = _SHARES[cut]
    unit = "size" if table.global_batch_tokens is None else "tokens"
    whole = tokens or largest(table.global_batch_tokens) or min(largest(table.global_batch_size) or SAMPLES, SAMPLES)
    part = max(1, -(-whole * up // down))
    if cut == "ragged" and unit == "size":
        # odd numbers that do not divide the whole, so that places of samples in a batch change as well
        odd = [one for one in range(3, whole, 2) if whole % one]
        part = min(odd, key=lambda one: abs(one - part), default=part)
    made: dict[str, object] = dict.fromkeys((f"{key}.micro_batch_size", f"{key}.micro_batch_tokens"), "none")
    return made | {f"{key}.global_batch_{unit}": whole, f"{key}.micro_batch_{unit}": part}


def _subject(parts: RunParts, opened: OpenRun) -> Subject:
    def trainer(data: Data, hooks: Sequence[Hook], folder: Path | None) -> Trainer:
        return replace(parts, data=data).trainer(hooks=hooks, folder=folder, kept=opened.tables)

    return Subject(
        model=parts.model,
        tasks={"": parts.task} if isinstance(parts.task, Task) else parts.task,
        optimizer=parts.optimizer,
        data=parts.data,
        hooks=list(parts.hooks),
        trainer=trainer,
        lr_schedule=build_lr_schedule(parts.config),
    )
