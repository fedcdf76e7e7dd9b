"""Evaluations and predictions: forwards over sets of data in evaluation mode.

Losses and metrics are summed as in training. Predictions are gathered batch by batch, so all layouts give equal bits.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, final

from torch import Tensor

from evenstep.data import Data, GlobalBatch, Microbatch
from evenstep.data.tree import rebuilt
from evenstep.errors import DataError, LostRankError
from evenstep.events import Bus, EvaluateEvent, Record, Writers
from evenstep.internals import pytree
from evenstep.optim.optimizers import evaluating
from evenstep.train.build import Parts
from evenstep.train.cut import SplitLimit
from evenstep.train.forwards import Read, one_epoch, run_forwards
from evenstep.train.ledger import Ledger
from evenstep.train.progress import Prediction
from evenstep.train.reporter import data_incidents
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.task import Task, evaluates_itself
from evenstep.train.update.context import TrainContext
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import task_of, weigh


@final
class Evaluator:
    """Evaluates the model of an engine, and predicts with it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        ema = parts.train.ema
        self._passes = (("", False),) if ema is None else ema.passes
        self._cuts: dict[str, SplitLimit] = {}

    @contextmanager
    def parameters(self, *, average: bool | None = None) -> Generator[None]:
        """Inside, the parameters are the average's, where that is to be evaluated (first), or else the optimizer's."""
        parts = self.parts
        parts.core.require_whole()
        values = parts.saved.average if (self._passes[0][1] if average is None else average) else None
        put_in = evaluating(parts.optimizer, parts.model.parameters(), parts.execution.reducers.after_step)
        with put_in, nullcontext() if values is None else values.swapped():
            yield

    def span(self, name: str, update: int, values: Mapping[str, float]) -> AbstractContextManager[None]:
        """Events around the evaluation `name`; `values` has its metrics at the end."""
        return self.parts.context.bus.span(
            "evaluate",
            lambda: EvaluateEvent(update=update, name=name),
            lambda error: EvaluateEvent(update=update, name=name, metrics=values),
        )

    def records(
        self,
        name: str,
        read: Read,
        update: int,
        *,
        context: TrainContext | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        batches: int | None = None,
    ) -> list[Record]:
        """Metrics of the parameters after `update`, such as "valid/loss": Σsum/Σweight; all ranks call it together.

        Args:
            name: of the set, the prefix of its metrics.
            context: where metrics are collected; nothing else may be pending in its storage.
            is_stopped: asked before each batch; BrokenOff is raised if it is true.
            batches: how many to evaluate; None for one epoch.
        """
        execution, context = self.parts.execution, context or self.parts.context
        storage = context.storage
        context = replace(context, cuts=self._cuts.setdefault(name, SplitLimit(sums=context.cuts.sums)))
        records: list[Record] = []
        for below, average in self._passes:
            prefix, mark = f"{name}/{below}", storage.mark()
            recovery = Recovery(execution=execution, context=context, evaluation=name)
            epoch = one_epoch(read, self.parts.model, context, execution.reducers.data_group)
            try:
                with self.parameters(average=average), epoch as given:
                    for batch in islice(given, batches):
                        if is_stopped():
                            raise BrokenOff
                        self._one_batch(name, prefix, batch, context, recovery, update)
            except (LostRankError, BrokenOff):
                storage.drop_after(mark)  # the set is evaluated once more
                raise
            found = storage.settle(execution.world.gather)
            if not any(record.name.startswith(prefix) for record in found):
                raise DataError(
                    f"the evaluation '{name}' gave nothing: the weights of all its batches are 0, or `evaluate` gave "
                    f"neither a loss nor metrics. Look at its data, and at `weight` and `evaluate` of the task."
                )
            records += found
        return records

    def apart(
        self, name: str, read: Read, update: int, *, batches: int | None = None, bus: Bus | None = None
    ) -> dict[str, float]:
        """Metrics by name without prefix, of which the run keeps none; only the hooks of `bus` are called."""
        own = self.parts.context
        context = replace(own, storage=build_storage(own.tasks, own.device), bus=bus or Bus((), None))
        return _without_prefix(self.records(name, read, update, context=context, batches=batches), name)

    def predict(self, data: Data, update: int, *, collect: bool | None) -> list[Prediction]:
        """Predictions for one epoch of `data`, one per micro-batch; see `Trainer.predict`."""
        execution, context = self.parts.execution, self.parts.context
        collects = execution.group.rank == 0 if collect is None else collect
        found: list[Prediction] = []
        epoch = one_epoch(data.batches, self.parts.model, context, execution.reducers.group)
        with self.parameters(), epoch as batches:
            for batch in batches:
                self._report_faults(batch, update, context)
                everybody = execution.group.gather(self._predicted(batch))
                if collects:
                    in_order = sorted((one for theirs in everybody for one in theirs), key=lambda one: one[0])
                    found += [prediction for _, prediction in in_order]
        return found

    def _report_faults(self, batch: GlobalBatch, update: int, context: TrainContext) -> None:
        for incident in data_incidents(batch, update, self.parts.execution.world.rank):
            context.report(incident)

    def _one_batch(
        self, name: str, prefix: str, batch: GlobalBatch, context: TrainContext, recovery: Recovery, update: int
    ) -> None:
        execution, storage, number = self.parts.execution, context.storage, batch.position.batch
        self._report_faults(batch, update, context)
        every = weigh(context.tasks, batch, execution.reducers.group)
        for task in every.totals:  # one task after the other, on all ranks
            weights = every.of(task)
            generates = evaluates_itself(context.tasks[task])
            undo = partial(storage.drop_after, storage.mark())
            for attempt in recovery.attempts(f"batch {number} of evaluation '{name}'", update, undo):
                with attempt:
                    step = MicrobatchStep(
                        context,
                        weights.work,
                        Recording(context, weights, update, prefix, method="evaluate" if generates else "loss"),
                        path=("evaluate", name, number),
                        update=update,
                        model=self.parts.model if generates else None,
                    )
                    run_forwards(execution, step, kind=task)
                    if execution.evaluates_together:  # no rank goes on while another may have to begin again
                        execution.group.sum_floats([0.0])

    def _predicted(self, batch: GlobalBatch) -> list[tuple[int, Prediction]]:
        execution, context = self.parts.execution, self.parts.context.silently()
        for one in batch.microbatches:
            task_of(context.tasks, one)
        predictions = _Predictions()
        for name in dict.fromkeys(part.task for part in batch.parts) or [""]:  # one task after the other, on all ranks
            work = tuple(one for one in batch.microbatches if one.task == name)
            step = MicrobatchStep(context, work, predictions, path=("predict", batch.position.batch))
            run_forwards(execution, step, kind=f"predict {name}")
        return predictions.kept


@final
@dataclass(slots=True)
class _Predictions:
    """Observer that keeps copies of predictions with the numbers of their micro-batches."""

    kept: list[tuple[int, Prediction]] = field(default_factory=list)

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        return pytree.tree_map(_copied, task.predict(output, batch))

    def take(self, task: Task, one: Microbatch, seen: Any) -> None:
        samples = [int(sample) for sample in one.samples]
        self.kept.append((one.index, Prediction(output=seen, samples=samples, task=one.task)))


def _copied(leaf: Any) -> Any:
    # a copy, since a view would keep the whole that it is a part of
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, Mapping) or (is_dataclass(leaf) and not isinstance(leaf, type)):  # torch has them for leaves
        return rebuilt(leaf, partial(pytree.tree_map, _copied))
    return leaf


@final
@dataclass(slots=True, kw_only=True)
class Evaluations:
    """The evaluations of a run; the metrics of training must have been written before.

    Args:
        sets: data by name.
        evaluated_at: update after which each set was last evaluated with all, by name.
        is_running: an evaluation or a prediction is being made.
    """

    evaluator: Evaluator
    ledger: Ledger
    sets: Mapping[str, Data]
    writers: Writers
    requests: Requests
    evaluated_at: dict[str, int] = field(default_factory=dict[str, int])
    is_running: bool = False

    @property
    def _update(self) -> int:
        return self.ledger.progress.update

    @property
    def due(self) -> list[str]:
        """Sets on which the current parameters were not evaluated."""
        return [name for name in self.sets if self.evaluated_at.get(name) != self._update]

    def all(self) -> bool:
        """Evaluate on all sets that are due; False if an urgent stop has broken that off."""
        for name in self.due:
            try:
                self({name: self.sets[name]})
            except BrokenOff:
                return False
            self.evaluated_at[name] = self._update
        return True

    def __call__(self, sets: Mapping[str, Data]) -> dict[str, dict[str, float]]:
        """Metrics of each set, without its name as prefix."""
        with self._running("evaluate"):
            return {name: self._one(name, data) for name, data in sets.items()}

    def try_out(self) -> None:
        """Evaluate one batch of each set and forget the result, so that faults of its data are found early."""
        with self._running("check"), self.evaluator.parts.core.rollback.unchanged():
            for name, data in self.sets.items():
                with closing(data):
                    self.evaluator.apart(name, data.batches, self._update, batches=1)

    def of(self, data: Data) -> dict[str, float]:
        """Metrics of data that are no evaluation of the run; hooks and writers do not get them."""
        with self._running("evaluate"):
            return self.evaluator.apart("data", data.batches, self._update)

    def predict(self, data: Data, *, collect: bool | None) -> list[Prediction]:
        """Predictions for one epoch of `data`; see `Trainer.predict`."""
        with self._running("evaluate"):
            return self.evaluator.predict(data, self._update + 1, collect=collect)

    def close(self) -> None:
        """End the processes that read the sets."""
        for data in self.sets.values():
            data.close()

    @contextmanager
    def _running(self, phase: str) -> Generator[None]:
        self.is_running = True
        try:
            with self.evaluator.parts.context.phases.only(phase):
                yield
        finally:
            self.is_running = False

    def _one(self, name: str, data: Data) -> dict[str, float]:
        values: dict[str, float] = {}
        evaluator, world = self.evaluator, self.evaluator.parts.execution.world
        with evaluator.span(name, self._update, values):
            is_stopped = partial(self.requests.is_broken_off, world)
            records = evaluator.records(name, data.batches, self._update, is_stopped=is_stopped)
            self.writers.write(records)
            values |= {record.name: record.value for record in records}
        return _without_prefix(records, name)


def _without_prefix(records: list[Record], name: str) -> dict[str, float]:
    return {record.name.removeprefix(f"{name}/"): record.value for record in records}
