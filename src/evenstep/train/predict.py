"""Runs a model forward only and collects predictions of its tasks, in the order of the data.

Ranks that hold outputs send them to those that collect, batch by batch, so all layouts give the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from evenstep.data import Data, GlobalBatch, Microbatch
from evenstep.data.tree import rebuilt
from evenstep.errors import LostRankError, OutOfMemoryError, clause
from evenstep.internals import pytree
from evenstep.parallel import Group
from evenstep.pipeline.wire import Address, Wire
from evenstep.train.cut import SubBatch
from evenstep.train.forwards import one_epoch, run_forwards
from evenstep.train.progress import Prediction
from evenstep.train.tasks.task import Task
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import Weights, task_of


class Kept(NamedTuple):
    """Values that a task keeps of a micro-batch."""

    microbatch: int
    task: str
    samples: list[int]
    output: Any


def predict(
    data: Data,
    *,
    model: nn.Module,
    context: TrainContext,
    execution: Execution,
    collect: bool | None,
    hear: Callable[[GlobalBatch], None],
) -> list[Prediction]:
    """Run one epoch of `data` forward; all ranks call it together.

    Args:
        collect: True if this rank gets the predictions, one per micro-batch; None: the first one does.
        hear: called with each batch, which may have left out samples that could not be read.
    """
    group = execution.group
    collects = group.rank == 0 if collect is None else collect
    everybody = group.gather((collects, execution.holds_output))
    exchange = _Exchange(
        group=group,
        wire=Wire(group, context.device),
        collecting=[rank for rank, (theirs, _) in enumerate(everybody) if theirs],
        holding=[rank for rank, (_, theirs) in enumerate(everybody) if theirs],
    )
    silent = context.silently()
    recovery = Recovery(execution=execution, context=silent)
    found: list[Prediction] = []
    try:
        with one_epoch(data.batches, model, context, execution.reducers.group) as batches:
            for batch in batches:
                hear(batch)
                kept = exchange(_outputs(batch, silent, execution, recovery))
                found += [Prediction(output=one.output, samples=one.samples, task=one.task) for one in kept]
    except Exception as error:
        if not isinstance(error, LostRankError):
            group.fail(clause(error))
        raise
    return found


@final
@dataclass(slots=True)
class _Outputs:
    """Observer that keeps copies of predictions; forwards run in the order of their numbers."""

    kept: list[Kept] = field(default_factory=list)

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        return pytree.tree_map(_copied, task.predict(output, batch))

    def take(self, task: Task, one: Microbatch, piece: SubBatch, seen: Any) -> None:
        self.kept.append(Kept(one.index, one.task, [int(sample) for sample in one.samples], seen))


def _outputs(batch: GlobalBatch, context: TrainContext, execution: Execution, recovery: Recovery) -> list[Kept]:
    for one in batch.microbatches:
        task_of(context.tasks, one)
    compute = partial(_computed, batch, context, execution)
    if not execution.evaluates_together:
        return compute()
    kept = recovery.once(f"batch {batch.position.batch} of a prediction", compute)
    if kept is None:
        raise OutOfMemoryError(
            f"rank {execution.group.rank}, or one that it shares the model with, ran out of memory in a prediction. "
            f"Make the micro-batches of its data smaller."
        )
    return kept


def _computed(batch: GlobalBatch, context: TrainContext, execution: Execution) -> list[Kept]:
    outputs = _Outputs()
    for name in dict.fromkeys(part.task for part in batch.parts) or [""]:  # one task after the other, on all ranks
        work = tuple(one for one in batch.microbatches if one.task == name)
        weights = Weights.of_forwards(name, work, num_microbatches=batch.num_microbatches)
        path = ("predict", batch.position.batch)
        run_forwards(context, execution, weights, outputs, path=path, kind=f"predict {name}")
    if execution.evaluates_together:
        execution.group.sum_floats([0.0])  # no rank goes on before all have come through
    return outputs.kept


def _copied(leaf: Any) -> Any:
    # a copy, since a view would keep the whole that it is a part of
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    is_instance = is_dataclass(leaf) and not isinstance(leaf, type)
    if isinstance(leaf, Mapping) or is_instance:  # torch does not look into these
        return rebuilt(leaf, partial(pytree.tree_map, _copied))
    return leaf


@final
@dataclass(frozen=True, slots=True)
class _Exchange:
    """Sends the outputs of a global batch from the ranks that hold them to those that collect them."""

    group: Group
    wire: Wire
    collecting: Sequence[int]
    holding: Sequence[int]

    def __call__(self, mine: list[Kept]) -> list[Kept]:
        rank = self.group.rank
        everything = list(mine)
        for other in self.collecting:
            if other != rank and rank in self.holding:
                self.wire.send(Address("prediction", rank, other, 0), [tuple(one) for one in mine], other)
        if rank in self.collecting:
            for other in self.holding:
                if other != rank:
                    received = self.wire.receive(Address("prediction", other, rank, 0), other)
                    # its tensors share one piece of memory, which each would keep alive
                    everything += [Kept(*pytree.tree_map(_copied, one)) for one in received]
        self.wire.flush()
        return sorted(everything, key=lambda one: one.microbatch) if rank in self.collecting else []
