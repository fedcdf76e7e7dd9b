"""Evaluates a model on one set of data: the forward half of an update.

Every batch runs forward only, in evaluation mode, through the same runner, precision and task as in training; losses
and metrics are summed as (sum, weight) pairs. The model's training modes are restored afterwards.
"""

from functools import partial
from itertools import islice
from typing import final

from torch import nn

from evenstep.data import Data
from evenstep.errors import DataError, LostRankError, TaskError
from evenstep.events import Record
from evenstep.train.forwards import one_epoch, run_forwards
from evenstep.train.reporter import data_incidents
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.tasks.task import evaluates_itself
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import Weights, weigh


@final
class Evaluation:
    """Evaluates one model on one set of data.

    Args:
        name: of the set, the prefix of its metrics: "valid" gives "valid/loss".
        below: what stands between that and the metrics' own names: "parameters/" gives "valid/parameters/loss".
        data: evaluated in its own order.
        requests: an urgent stop breaks off the evaluation, between two batches or while data are read.
        batches: number of batches to evaluate; None for one epoch.
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
        requests: Requests,
        batches: int | None = None,
    ) -> None:
        self._name = name
        self._prefix = f"{name}/{below}"
        self._data = data
        self._model = model
        self._context = context
        self._execution = execution
        self._requests = requests
        self._batches = batches
        self._recovery = Recovery(execution=execution, context=context, evaluation=name)

    def __call__(self, update: int) -> list[Record]:
        """Evaluate the parameters after `update`. Nothing else may be pending in the storage.

        Returns:
            The metrics, "valid/loss" and so on: Σsum/Σweight over the whole set.
        """
        storage, tasks = self._context.storage, self._context.tasks.values()
        mark = storage.mark()
        try:
            self._run(update)
        except (LostRankError, BrokenOff):
            storage.drop_after(mark)  # the set is evaluated once more
            raise
        records = storage.settle(self._execution.world.gather)
        if not any(record.name.startswith(self._prefix) for record in records):
            kinds = ", ".join(f"`{type(task).__name__}`" for task in tasks)
            raise DataError(
                f"the evaluation '{self._name}' gave nothing: the weights of all its batches are 0, or `evaluate` gave "
                f"neither a loss nor metrics. Look at its data, and at `weight` and `evaluate` of {kinds}."
            )
        return records

    def _run(self, update: int) -> None:
        context, execution = self._context, self._execution
        with one_epoch(self._data, self._model, context, execution.reducers.data_group) as batches:
            read = self._requests.reading(batches, execution.world)
            for batch in islice(read, self._batches):
                if self._requests.is_broken_off(execution.world):
                    raise BrokenOff
                if self._model.training:
                    raise TaskError(
                        f"the evaluation '{self._name}' found the model in training mode; something has called "
                        f"`train()` on it meanwhile."
                    )
                for incident in data_incidents(batch, update, execution.group.rank):
                    context.report(incident)
                weights = weigh(context.tasks, batch, execution.reducers.group)
                for name in weights.totals:  # one task after the other, on all ranks
                    self._one_task(weights.of(name), name, update, batch.position.batch)

    def _one_task(self, weights: Weights, name: str, update: int, batch: int) -> None:
        execution, storage = self._execution, self._context.storage
        generates = evaluates_itself(self._context.tasks[name])
        undo = partial(storage.drop_after, storage.mark())
        for attempt in self._recovery.attempts(f"batch {batch} of evaluation '{self._name}'", update, undo):
            with attempt:
                run_forwards(
                    self._context,
                    execution,
                    weights,
                    Recording(self._context, weights, update, self._prefix, method="evaluate" if generates else "loss"),
                    path=("evaluate", self._name, batch),
                    kind=name,
                    update=update,
                    model=self._model if generates else None,
                    watch=self._recovery.watch,
                )
                if execution.evaluates_together:  # no rank goes on while another may have to begin again
                    execution.group.sum_floats([0.0])
