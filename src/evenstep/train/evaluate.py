"""Evaluations and predictions: forwards over sets of data in evaluation mode.

Losses and metrics are summed as in training. Predictions are gathered batch by batch, so all layouts give equal bits.
"""

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
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
from evenstep.train.reporter import report_faults
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.task import Task, evaluates_itself
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import task_of, weigh


@final
class Evaluator:
    """Evaluates a model and predicts with it; the metrics of training must have been written before.

    Args:
        sets: data of the run's evaluations by name.
        writers: get the metrics of these.
        requests: an urgent stop breaks an evaluation off.

    Attributes:
        evaluated_at: update after which each set was last evaluated with all, by name.
        is_running: an evaluation or a prediction is being made.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        *,
        sets: Mapping[str, Data] = MappingProxyType({}),
        writers: Writers | None = None,
        requests: Requests | None = None,
    ) -> None:
        self.sets = sets
        self.evaluated_at: dict[str, int] = {}
        self.is_running = False
        self._parts = parts
        self._ledger = ledger
        self._writers = writers
        self._requests = requests
        self._context = replace(parts.context, cuts=SplitLimit(sums=parts.train.check_loss))

    @property
    def due(self) -> list[str]:
        """Sets on which the current parameters were not evaluated."""
        return [name for name in self.sets if self.evaluated_at.get(name) != self._ledger.progress.update]

    def all(self) -> bool:
        """Evaluate on all sets that are due; False if an urgent stop has broken that off."""
        for name in self.due:
            try:
                self({name: self.sets[name]})
            except BrokenOff:
                return False
            self.evaluated_at[name] = self._ledger.progress.update
        return True

    def __call__(self, sets: Mapping[str, Data]) -> dict[str, dict[str, float]]:
        """Metrics of each set, without its name as prefix."""
        with self._running("evaluate"):
            return {name: self._heard(name, data.batches, self._context) for name, data in sets.items()}

    def once(self, name: str, read: Read, bus: Bus) -> dict[str, float]:
        """Metrics that the run does not keep; the hooks of `bus` are called."""
        return self._heard(name, read, self._apart(bus))

    def of(self, data: Data) -> dict[str, float]:
        """Metrics of data that are no evaluation of the run; hooks and writers do not get them."""
        with self._running("evaluate"):
            return _by_name(self._records("data", data.batches, self._apart()), "data/")

    def try_out(self) -> None:
        """Evaluate one batch of each set and forget the result, so that faults of its data are found early."""
        with self._running("check"), self._parts.core.rollback.unchanged():
            for name, data in self.sets.items():
                with closing(data):
                    self._records(name, data.batches, self._apart(), batches=1)

    def predict(self, data: Data) -> list[Prediction]:
        """Predictions for one epoch of `data`, for the first rank one per micro-batch; see `Trainer.predict`."""
        execution = self._parts.execution
        group = execution.group
        found: list[Prediction] = []
        epoch = one_epoch(data.batches, self._parts.model, self._context, execution.reducers.group)
        with self._running("evaluate"), self._parameters(), epoch as batches:
            for batch in batches:
                self._report_faults(batch)
                everybody = group.gather(self._predicted(batch))
                if group.rank == 0:
                    in_order = sorted((one for theirs in everybody for one in theirs), key=lambda one: one[0])
                    found += [prediction for _, prediction in in_order]
        return found

    def close(self) -> None:
        """End the processes that read the sets."""
        for data in self.sets.values():
            data.close()

    @contextmanager
    def _running(self, phase: str) -> Generator[None]:
        self.is_running = True
        try:
            with self._context.phases.only(phase):
                yield
        finally:
            self.is_running = False

    @contextmanager
    def _parameters(self) -> Generator[None]:
        parts, ema = self._parts, self._parts.train.ema
        parts.core.require_whole()
        values = parts.average if ema is not None and ema.evaluated == "average" else None
        put_in = evaluating(parts.optimizer, parts.model.parameters(), parts.execution.reducers.after_step)
        with put_in, nullcontext() if values is None else values.swapped():
            yield

    def _apart(self, bus: Bus | None = None) -> TrainContext:
        own = self._context
        return replace(own, storage=build_storage(own.tasks, own.device), bus=bus or Bus((), None))

    def _heard(self, name: str, read: Read, context: TrainContext) -> dict[str, float]:
        update = self._ledger.progress.update
        values: dict[str, float] = {}

        def event(error: BaseException | None = None) -> EvaluateEvent:
            return EvaluateEvent(update=update, name=name, metrics=values)

        with context.bus.span("evaluate", event, event):
            records = self._records(name, read, context)
            if self._writers is not None:
                self._writers.write(records)
            values |= _by_name(records)
        return _by_name(records, f"{name}/")

    def _records(self, name: str, read: Read, context: TrainContext, *, batches: int | None = None) -> list[Record]:
        """Metrics such as "valid/loss": Σsum/Σweight over so many batches, or one epoch; all ranks call it together."""
        execution, storage = self._parts.execution, context.storage
        mark = storage.mark()
        recovery = Recovery(execution=execution, context=context, evaluation=name)
        epoch = one_epoch(read, self._parts.model, context, execution.reducers.data_group)
        try:
            with self._parameters(), epoch as given:
                for batch in islice(given, batches):
                    if batches is None and self._requests and self._requests.is_broken_off(execution.world):
                        raise BrokenOff
                    self._one_batch(name, batch, context, recovery)
        except (LostRankError, BrokenOff):
            storage.drop_after(mark)  # the set is evaluated once more
            raise
        records = storage.settle(execution.world.gather)
        if not any(record.name.startswith(f"{name}/") for record in records):
            raise DataError(
                f"the evaluation '{name}' gave nothing: the weights of all its batches are 0, or `evaluate` gave "
                f"neither a loss nor metrics. Look at its data, and at `weight` and `evaluate` of the task."
            )
        return records

    def _report_faults(self, batch: GlobalBatch) -> None:
        report_faults(self._context.report, batch, self._ledger.progress.update, self._parts.execution.world.rank)

    def _one_batch(self, name: str, batch: GlobalBatch, context: TrainContext, recovery: Recovery) -> None:
        execution, storage, number = self._parts.execution, context.storage, batch.position.batch
        update = self._ledger.progress.update
        self._report_faults(batch)
        every = weigh(context.tasks, batch, execution.reducers.group)
        for task in every.totals:  # one task after the other, on all ranks
            weights = every.of(task)
            generates = evaluates_itself(context.tasks[task])
            undo = partial(storage.drop_after, storage.mark())
            for attempt in recovery.attempts(f"batch {number} of evaluation '{name}'", update, undo):
                with attempt:
                    method = "evaluate" if generates else "loss"
                    run_forwards(
                        execution,
                        context,
                        weights.work,
                        Recording(context, weights, update, f"{name}/", method=method).take,
                        path=("evaluate", name, number),
                        kind=task,
                        update=update,
                        model=self._parts.model if generates else None,
                    )
                    if execution.evaluates_together:  # no rank goes on while another may have to begin again
                        execution.group.sum_floats([0.0])

    def _predicted(self, batch: GlobalBatch) -> list[tuple[int, Prediction]]:
        execution, context = self._parts.execution, self._context.silently()
        for one in batch.microbatches:
            task_of(context.tasks, one)
        kept: list[tuple[Microbatch, Any]] = []
        for name in dict.fromkeys(part.task for part in batch.parts) or [""]:  # one task after the other, on all ranks
            work = tuple(one for one in batch.microbatches if one.task == name)
            run_forwards(
                execution,
                context,
                work,
                lambda task, one, seen: kept.append((one, seen)),
                see=_prediction,
                path=("predict", batch.position.batch),
                kind=f"predict {name}",
            )
        return [
            (one.index, Prediction(output=output, samples=[int(sample) for sample in one.samples], task=one.task))
            for one, output in kept
        ]


def _prediction(task: Task, output: Any, batch: Any) -> Any:
    return pytree.tree_map(_copied, task.predict(output, batch))


def _copied(leaf: Any) -> Any:
    # a copy, since a view would keep the whole that it is a part of
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, Mapping) or (is_dataclass(leaf) and not isinstance(leaf, type)):  # torch has them for leaves
        return rebuilt(leaf, partial(pytree.tree_map, _copied))
    return leaf


def _by_name(records: list[Record], prefix: str = "") -> dict[str, float]:
    return {record.name.removeprefix(prefix): record.value for record in records}
