"""The run of a run file, reduced to minutes on a CPU, in each of the variants that are compared.

The global batch and the number of updates are reduced; the run keeps its length, which the LR schedule counts with.
"""

import math
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

from torch.utils.data import Subset

from evenstep.cli.launch import end_with_parent, joined
from evenstep.config.build import RunParts, build_lr_schedule, build_parts, make_model
from evenstep.config.build_data import is_stream
from evenstep.config.load import OpenRun, Setting, open_run, settings_in
from evenstep.config.run import DataTable, RunConfig
from evenstep.data import Data
from evenstep.data.batching import largest
from evenstep.errors import DataError, EvenstepError, LostRankError, clause
from evenstep.events import Hook
from evenstep.optim.schedules import Plateau
from evenstep.parallel import Group
from evenstep.pipeline import Layers
from evenstep.tools.prove.run import Cut, Ended, RefusedError, Subject, Variant, run_once, widen_data
from evenstep.tools.prove.trace import Calls, UpdateTrace
from evenstep.train import Coefficients, Task, Trainer
from evenstep.train.run_state import updates_of

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
    "failures.max_rewinds": "none",
    "parallel": "none",
}


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
        self._group = Group()
        self._tokens = tokens
        with open_run(path, given) as opened:
            self.config = opened.config

    @contextmanager
    def open(self, variant: Variant) -> Generator[Subject]:
        """Build a variant, which is closed at the end of the `with`."""
        with open_run(self._path, self._settings(variant)) as opened:
            share: dict[str, float] = {}
            with closing(build_parts(opened.config, self._group, reduce=_few_samples(opened.config, share))) as parts:
                epochs = opened.config.train.epochs
                if epochs is not None:  # as long as with all samples
                    train = replace(opened.config.train, epochs=math.ceil(epochs / min([1.0, *share.values()])))
                    parts = replace(parts, config=replace(opened.config, train=train))
                for data in parts.evaluations.values():
                    data.limit_batches = 1
                    if variant.wide:
                        widen_data(data)
                yield _subject(parts, opened)

    def elsewhere(self, variant: Variant, /, **options: Any) -> Ended:
        """Make a run as `run_once` does, in a new process for each rank; BrokenProcessPool if one was killed."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        given = self._path, self._given, self._tokens, variant, options, port
        with ProcessPoolExecutor(variant.ranks, multiprocessing.get_context("spawn")) as pool:
            try:
                ranks = [pool.submit(_be_rank, *given, rank) for rank in range(variant.ranks)]
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
            parts: dict[str, Calls] = {}
            for theirs in self._group.gather(None if made.trace is None else made.trace.parts):
                for part, calls in (theirs or {}).items():
                    parts[part] = calls | parts.get(part, {})
        return made if made.trace is None else replace(made, trace=UpdateTrace(parts, made.trace.states))

    def layered(self) -> str:
        """Reason why the model can't be cut into stages, or ""."""
        with open_run(self._path, self._settings(Variant())) as opened:
            try:
                Layers.of(make_model(opened.config))
            except EvenstepError as error:
                return f"its layers are not known: {error}"
        return ""

    def fit_tokens(self) -> str:
        """Choose the budgets of batches that are cut by tokens; gives the reason why they can't be cut, or ""."""
        budgets = {key: largest(table.global_batch_tokens) for key, table in self.config.sets.items()}
        reason = ""
        for share in (16, 8, 4, 2, 1):
            self._tokens = {key: max(4, whole // share) for key, whole in budgets.items() if whole is not None}
            try:
                with self.open(Variant(cut="4")):
                    return ""
            except DataError as error:
                reason = str(error)
        return f"its global batches can't be cut in four: {reason}" if self._tokens else ""

    def _settings(self, variant: Variant) -> list[Setting]:
        config = self.config
        parallel = config.parallel
        changed = {
            **_REDUCED,
            "parallel.strategy": variant.strategy,
            "parallel.reduction": "fast" if variant.fast else "ordered",
            "parallel.timeout_s": parallel.timeout_s,
            "launch.ranks": variant.ranks,
            "train.check_loss": str(variant.checks_loss).lower(),
        }
        if str(config.failures.non_finite).startswith("rewind"):
            changed["failures.non_finite"] = "stop"
        if str(config.failures.loss_spike).startswith("rewind"):
            changed["failures.loss_spike"] = "report"
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
        if not variant.own_format:
            changed["train.precision"] = "32-true"
        return [*self._given, *settings_in(changed)]


def _be_rank(
    path: Path,
    given: Sequence[Setting],
    tokens: Mapping[str, int],
    variant: Variant,
    options: Mapping[str, Any],
    port: int,
    rank: int,
) -> Any:
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
        made = RunFileBench(path, given, tokens).run_as_rank(variant, lambda: began.append(True), options)
    except Exception as error:  # noqa: BLE001 - reported by the parent; some errors can't be pickled
        is_refusal = isinstance(error, EvenstepError) and not isinstance(error, LostRankError) and not began
        return RefusedError(str(error)) if is_refusal else EvenstepError(clause(error))
    return made if rank == 0 else None


def _few_samples(config: RunConfig, shares: dict[str, float]) -> Callable[[str, Any], Any]:
    """Reduces training sets so that an epoch is two updates, the second a short one; notes the share that is left."""

    def reduce(key: str, dataset: Any) -> Any:
        table = config.sets.get(key.removesuffix(".train"))
        if table is None or is_stream(dataset):
            return dataset
        whole = SAMPLES if table.global_batch_tokens is not None else largest(table.global_batch_size) or SAMPLES
        count = whole + -(-whole * 2 // 3)
        if len(dataset) <= count:
            return dataset
        shares[key] = count / len(dataset)
        places = [place * len(dataset) // count for place in range(count)]  # from all over a sorted dataset
        some: Any = Subset(dataset, places)
        if hasattr(dataset, "lengths"):
            lengths: Any = dataset.lengths
            of_sample: Any = lengths if callable(lengths) else lengths.__getitem__
            some.lengths = [int(of_sample(one)) for one in places]
        return some

    return reduce


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
    config = parts.config
    train = config.train

    def trainer(data: Data, hooks: Sequence[Hook], folder: Path | None) -> Trainer:
        return replace(parts, data=data).trainer(hooks=hooks, folder=folder, kept=opened.tables)

    coefficients: Mapping[str, float] | None = None
    if train.combine is None and not isinstance(train.coefficients, Coefficients):
        coefficients = {name: (train.coefficients or {}).get(name, 1.0) for name in config.tasks}
    return Subject(
        model=parts.model,
        tasks={"": parts.task} if isinstance(parts.task, Task) else parts.task,
        optimizer=parts.optimizer,
        data=parts.data,
        hooks=list(parts.hooks),
        trainer=trainer,
        updates=train.updates if train.epochs is None else updates_of(parts.data, train.epochs, config.seed),
        coefficients=coefficients,
        lr_schedule=build_lr_schedule(config),
        clip_norm=train.clip_norm,
    )
