"""Evaluations: forwards of sets of data in evaluation mode, whose losses and metrics are summed as in training."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import final

from evenstep.data import Data, GlobalBatch
from evenstep.errors import DataError, LostRankError
from evenstep.events import Bus, EvaluateEvent, Record
from evenstep.train.build import Parts
from evenstep.train.cut import SplitLimit
from evenstep.train.forwards import Read, one_epoch, run_forwards
from evenstep.train.ledger import Ledger
from evenstep.train.predict import predict
from evenstep.train.progress import Prediction
from evenstep.train.reporter import Reporter, data_incidents
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.task import evaluates_itself
from evenstep.train.timing import Phases
from evenstep.train.update.context import TrainContext
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import weigh


@final
class Evaluator:
    """Evaluates the model of an engine."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        ema = parts.train.ema
        self._passes = (("", False),) if ema is None else ema.passes
        self._cuts: dict[str, SplitLimit] = {}

    @contextmanager
    def parameters(self, *, average: bool | None = None) -> Generator[None]:
        """Inside, the parameters are the average's, where that is to be evaluated (first), or else the optimizer's."""
        self.parts.core.require_whole()
        values = self.parts.saved.average if (self._passes[0][1] if average is None else average) else None
        with self.parts.modes.evaluating(), nullcontext() if values is None else values.swapped():
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
        requests: Requests | None = None,
        batches: int | None = None,
    ) -> list[Record]:
        """Metrics of the parameters after `update`, such as "valid/loss": Σsum/Σweight; all ranks call it together.

        Args:
            name: of the set, the prefix of its metrics.
            context: where metrics are collected; nothing else may be pending in its storage.
            requests: an urgent stop raises BrokenOff between two batches.
            batches: how many to evaluate; None for one epoch.
        """
        parts, context = self.parts, context or self.parts.context
        execution, storage = parts.execution, context.storage
        context = replace(context, cuts=self._cuts.setdefault(name, SplitLimit(sums=context.cuts.sums)))
        records: list[Record] = []
        for below, average in self._passes:
            prefix, mark = f"{name}/{below}", storage.mark()
            recovery = Recovery(execution=execution, context=context, evaluation=name)
            epoch = one_epoch(read, parts.model, context, execution.reducers.data_group)
            try:
                with self.parameters(average=average), epoch as given:
                    for batch in islice(given, batches):
                        if requests is not None and requests.is_broken_off(execution.world):
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
        self, name: str, read: Read, update: int, *, batches: int | None = None, is_silent: bool = True
    ) -> dict[str, float]:
        """Metrics by name without prefix, of which the run keeps none; `is_silent` calls no hooks."""
        own = self.parts.context
        bus = Bus((), None) if is_silent else own.bus
        context = replace(own, storage=build_storage(own.tasks, own.device), bus=bus)
        return without_prefix(self.records(name, read, update, context=context, batches=batches), name)

    def _one_batch(
        self, name: str, prefix: str, batch: GlobalBatch, context: TrainContext, recovery: Recovery, update: int
    ) -> None:
        parts, number = self.parts, batch.position.batch
        execution, storage = parts.execution, context.storage
        for incident in data_incidents(batch, update, execution.group.rank):
            context.report(incident)
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
                        model=parts.model if generates else None,
                    )
                    run_forwards(execution, step, kind=task)
                    if execution.evaluates_together:  # no rank goes on while another may have to begin again
                        execution.group.sum_floats([0.0])


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
    phases: Phases
    sets: Mapping[str, Data]
    reporter: Reporter
    requests: Requests
    evaluated_at: dict[str, int] = field(default_factory=dict[str, int])
    is_running: bool = False

    @property
    def due(self) -> list[str]:
        """Sets on which the current parameters were not evaluated."""
        return [name for name in self.sets if self.evaluated_at.get(name) != self.ledger.progress.update]

    def all(self) -> bool:
        """Evaluate on all sets that are due; False if an urgent stop has broken that off."""
        for name in self.due:
            try:
                self({name: self.sets[name]})
            except BrokenOff:
                return False
            self.evaluated_at[name] = self.ledger.progress.update
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
                    self.evaluator.apart(name, data.batches, self.ledger.progress.update, batches=1)

    def of(self, data: Data) -> dict[str, float]:
        """Metrics of data that are no evaluation of the run; hooks and writers do not get them."""
        with self._running("evaluate"):
            return self.evaluator.apart("data", data.batches, self.ledger.progress.update)

    def predict(self, data: Data, *, collect: bool | None) -> list[Prediction]:
        """Predictions for one epoch of `data`; see `predict.predict`."""
        parts, update = self.evaluator.parts, self.ledger.progress.update + 1

        def hear(batch: GlobalBatch) -> None:
            for incident in data_incidents(batch, update, parts.execution.world.rank):
                parts.context.report(incident)

        with self._running("evaluate"), self.evaluator.parameters():
            return predict(parts, data, collect=collect, hear=hear)

    def close(self) -> None:
        """End the processes that read the sets."""
        for data in self.sets.values():
            data.close()

    @contextmanager
    def _running(self, phase: str) -> Generator[None]:
        self.is_running = True
        try:
            with self.phases.only(phase):
                yield
        finally:
            self.is_running = False

    def _one(self, name: str, data: Data) -> dict[str, float]:
        values: dict[str, float] = {}
        update = self.ledger.progress.update
        with self.evaluator.span(name, update, values):
            records = self.evaluator.records(name, data.batches, update, requests=self.requests)
            self.reporter.writers.write(records)
            values |= {record.name: record.value for record in records}
        return without_prefix(records, name)


def without_prefix(records: list[Record], name: str) -> dict[str, float]:
    return {record.name.removeprefix(f"{name}/"): record.value for record in records}
