"""Runs a model forward only and collects predictions of its tasks, in the order of the data.

All ranks gather predictions batch by batch, so all layouts give the same bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from evenstep.data import Data, GlobalBatch, Microbatch
from evenstep.data.tree import rebuilt
from evenstep.errors import LostRankError, OutOfMemoryError, clause
from evenstep.internals import pytree
from evenstep.train.build import Parts
from evenstep.train.forwards import one_epoch, run_forwards
from evenstep.train.progress import Prediction
from evenstep.train.tasks.task import Task
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import task_of


def predict(parts: Parts, data: Data, *, collect: bool | None, hear: Callable[[GlobalBatch], None]) -> list[Prediction]:
    """Run one epoch of `data` forward; all ranks call it together.

    Args:
        collect: True if this rank gets the predictions, one per micro-batch; None: the first one does.
        hear: called with each batch, which may have left out samples that could not be read.
    """
    execution, silent = parts.execution, parts.context.silently()
    group = execution.group
    collects = group.rank == 0 if collect is None else collect
    recovery = Recovery(execution=execution, context=silent)
    found: list[Prediction] = []
    try:
        with one_epoch(data.batches, parts.model, parts.context, execution.reducers.group) as batches:
            for batch in batches:
                hear(batch)
                everybody = group.gather(_outputs(batch, silent, execution, recovery))
                if collects:
                    in_order = sorted((one for theirs in everybody for one in theirs), key=lambda one: one[0])
                    found += [prediction for _, prediction in in_order]
    except Exception as error:
        if not isinstance(error, LostRankError):
            group.fail(clause(error))
        raise
    return found


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


def _outputs(
    batch: GlobalBatch, context: TrainContext, execution: Execution, recovery: Recovery
) -> list[tuple[int, Prediction]]:
    for one in batch.microbatches:
        task_of(context.tasks, one)
    if not execution.evaluates_together:
        return _computed(batch, context, execution)
    place = f"batch {batch.position.batch} of a prediction"
    kept = recovery.once(place, partial(_computed, batch, context, execution))
    if kept is None:
        raise OutOfMemoryError(
            f"rank {execution.group.rank}, or one that it shares the model with, ran out of memory in a prediction. "
            f"Make the micro-batches of its data smaller."
        )
    return kept


def _computed(batch: GlobalBatch, context: TrainContext, execution: Execution) -> list[tuple[int, Prediction]]:
    predictions = _Predictions()
    for name in dict.fromkeys(part.task for part in batch.parts) or [""]:  # one task after the other, on all ranks
        work = tuple(one for one in batch.microbatches if one.task == name)
        step = MicrobatchStep(context, work, predictions, path=("predict", batch.position.batch))
        run_forwards(execution, step, kind=f"predict {name}")
    if execution.evaluates_together:
        execution.group.sum_floats([0.0])  # no rank goes on before all have come through
    return predictions.kept


def _copied(leaf: Any) -> Any:
    # a copy, since a view would keep the whole that it is a part of
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, Mapping) or (
        is_dataclass(leaf) and not isinstance(leaf, type)
    ):  # torch does not look into them
        return rebuilt(leaf, partial(pytree.tree_map, _copied))
    return leaf
