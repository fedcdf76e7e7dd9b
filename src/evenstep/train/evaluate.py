"""Evaluates a model on one set of data: the forward half of an update.

Every batch is run forward only, in evaluation mode, through the same runner, precision and task as in training, and
its losses and metrics are summed as (sum, weight) pairs. The model's training modes are given back as they were, also
when something raises. It does not choose when.
"""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, cast, final

from torch import nn

from evenstep.data import Data, Microbatch, ReadOptions
from evenstep.errors import DataError, LostRankError, TaskError
from evenstep.events import Incident, Record
from evenstep.train.evaluating import evaluating
from evenstep.train.reporter import data_incidents
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.tasks.task import evaluates_itself
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import Weights, weigh


@final
class Evaluation:
    """Evaluates one model on one set of data.

    Args:
        name: of the set, the prefix of its metrics: "valid" gives "valid/loss".
        below: what stands between that and the metrics' own names: "parameters/" gives "valid/parameters/loss".
        data: evaluated for one epoch, whole, in its own order.
        report: told of incidents, such as samples that could not be read.
        requests: an urgent stop breaks off the evaluation, between two batches or while data are read.
        batches: how many to evaluate; None for one epoch.
    """

    def __init__(
        self,
        *,
        name: str,
        below: str = "",
        data: Data,
        model: nn.Module,
        context: TrainContext,
        execution: Execution,
        report: Callable[[Incident], None],
        requests: Requests,
        batches: int | None = None,
    ) -> None:
        self._name, self._prefix = name, f"{name}/{below}"
        self._data = data
        self._model = model
        self._context = context
        self._execution = execution
        self._report = report
        self._requests, self._batches = requests, batches
        self._recovery = Recovery(execution=execution, context=context, report=report, evaluation=name)
        self._own = [task for task, one in context.tasks.items() if evaluates_itself(one)]

    def __call__(self, update: int) -> list[Record]:
        """Evaluate the parameters after `update`. Nothing else may be pending in the storage.

        Returns:
            The metrics, "valid/loss" and so on: Σsum/Σweight over the whole set.
        """
        prefix, mark = self._prefix, self._context.storage.mark()
        try:
            with evaluating(self._model, self._context.device, self._context.tasks.values()):
                self._run(update)
        except (LostRankError, BrokenOff):
            self._context.storage.drop_after(mark)  # those that are left evaluate once more
            raise
        records = self._context.storage.settle(self._execution.world.gather)
        if not any(record.name.startswith(prefix) for record in records):
            kinds = ", ".join(f"`{type(task).__name__}.weight`" for task in self._context.tasks.values())
            if self._own:
                raise DataError(
                    f"the evaluation '{self._name}' gave nothing: the weights of all its batches are 0 (see {kinds}), "
                    f"or `evaluate` gave neither a loss nor metrics; return `Loss(None, metrics={{…}})`."
                )
            raise DataError(
                f"the evaluation '{self._name}' holds nothing to evaluate: the weights of all its batches are 0; "
                f"look at its data and at {kinds}."
            )
        return records

    def _run(self, update: int) -> None:
        reducers, context = self._execution.reducers, self._context
        batches = self._data.batches(
            ReadOptions(
                seed=context.seed,
                rank=reducers.data_group.rank,
                ranks=reducers.data_group.ranks,
                total=reducers.data_group.sum_floats,
            )
        )
        with closing(cast("Any", batches)):
            read = self._requests.reading(batches, self._execution.world)
            for number, batch in enumerate(read, start=1):
                if self._requests.is_broken_off(self._execution.world):
                    raise BrokenOff
                if self._model.training:
                    raise TaskError(
                        f"the evaluation '{self._name}' found the model in training mode; something has called "
                        f"`train()` on it meanwhile."
                    )
                for incident in data_incidents(batch, update, self._execution.group.rank):
                    self._report(incident)
                weights = weigh(context.tasks, batch, reducers.group)
                for name in weights.totals:  # one task after the other, on all ranks
                    self._through(weights.of(name), update, batch.position.batch)
                if batch.ends_epoch or number == self._batches:
                    break

    def _through(self, weights: Weights, update: int, batch: int) -> None:
        discard = partial(self._context.storage.drop_after, self._context.storage.mark())
        for attempt in self._recovery.attempts(f"batch {batch} of evaluation '{self._name}'", update, discard):
            with attempt:
                self._forwards(weights, update, batch)

    def _forwards(self, weights: Weights, update: int, batch: int) -> None:
        execution, task = self._execution, next(iter(weights.totals))
        generates = task in self._own
        if not generates:
            passes = self._context.cuts.passes(self._context.tasks, weights.work)
            execution.pad_passes(passes, self._dummy, backward=False, kind=task)
        with self._step(weights, self._model if generates else None, update=update, batch=batch) as step:
            execution.evaluator.run(execution.forwards(step.lay_out(step.work)), step)
        if execution.evaluates_together:  # none goes on while another may have to begin anew
            execution.group.sum_floats([0.0])

    @contextmanager
    def _dummy(self, microbatch: Microbatch) -> Generator[MicrobatchStep]:
        with MicrobatchStep.dummy(self._context, microbatch) as step:
            self._recovery.runs(step)
            yield step

    def _step(self, weights: Weights, model: nn.Module | None, *, update: int, batch: int) -> MicrobatchStep:
        step = MicrobatchStep(
            self._context,
            weights,
            path=("evaluate", self._name, batch),
            update=update,
            prefix=self._prefix,
            model=model,
        )
        self._recovery.runs(step)
        return step
