"""Runs a model forward only and collects what its tasks keep of the outputs, in the order of the data.

To the runner it is an evaluation whose losses are 0: tasks are asked for what they keep instead, where the last stage
is, and the ranks that want it get it global batch by global batch. So one process, replicas and stages give the same
bits. It looks at no labels and no weights, and changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from evenstep.data import Data, GlobalBatch, Microbatch, ReadOptions
from evenstep.data.tree import rebuilt
from evenstep.errors import LostRankError, OutOfMemoryError, clause
from evenstep.internals import pytree
from evenstep.parallel import Group
from evenstep.pipeline.wire import Address, Wire
from evenstep.train.evaluating import evaluating
from evenstep.train.result import Prediction
from evenstep.train.tasks.task import ObservedTask, Task
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import Weights, task_of

Kept: TypeAlias = tuple[int, str, list[int], Any]  # number of the micro-batch, its task, samples, and what is kept


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
        data: in its own order.
        collect: whether this rank gets the predictions; None: the first one does.
        hear: told of each batch, which may have left out samples that could not be read.

    Returns:
        One prediction per micro-batch, in the order of the data; none on ranks that do not collect.
    """
    group, reducers = execution.group, execution.reducers
    wants = group.rank == 0 if collect is None else collect
    everybody = group.gather((wants, execution.holds_output))
    exchanged = partial(
        _exchanged,
        group=group,
        wire=Wire(group, context.device),
        wanting=tuple(rank for rank, (wanting, _) in enumerate(everybody) if wanting),
        holding=tuple(rank for rank, (_, holding) in enumerate(everybody) if holding),
    )
    keep = _kept
    if execution.evaluates_together:
        recovery = Recovery(execution=execution, context=context, report=lambda incident: None)
        keep = partial(_kept_together, recovery=recovery)
    found: list[Prediction] = []
    total = reducers.group.sum_floats
    batches = data.batches(ReadOptions(seed=context.seed, rank=reducers.rank, ranks=reducers.ranks, total=total))
    try:
        with evaluating(model, context.device, context.tasks.values()), closing(cast("Any", batches)):
            for batch in batches:
                hear(batch)
                kept = exchanged(keep(batch, context, execution))
                found += [Prediction(output=output, samples=samples, task=task) for _, task, samples, output in kept]
                if batch.ends_epoch:
                    break
    except Exception as error:
        if not isinstance(error, LostRankError):
            group.fail(clause(error))
        raise
    return found


def _kept(batch: GlobalBatch, context: TrainContext, execution: Execution) -> list[Kept]:
    kept: list[Kept] = []
    for one in batch.microbatches:
        task_of(context.tasks, one)
    for name in dict.fromkeys(part.task for part in batch.parts) or [""]:  # one task after the other, on all ranks
        work = tuple(one for one in batch.microbatches if one.task == name)
        outputs: list[Any] = []
        weights = Weights.of_forwards(name, work, num_microbatches=batch.num_microbatches)
        path = ("predict", batch.position.batch)
        execution.pad_passes(work, partial(_dummy, context), backward=False, kind=f"predict {name}")
        with MicrobatchStep(_recording(context, outputs), weights, path=path) as step:
            execution.evaluator.run(execution.forwards(step.lay_out(step.work)), step)
        if execution.holds_output:
            kept += [
                (one.index, one.task, [int(sample) for sample in one.samples], output)
                for one, output in zip(work, outputs, strict=True)  # forwards run in the order of their numbers
            ]
    return kept


def _kept_together(batch: GlobalBatch, context: TrainContext, execution: Execution, recovery: Recovery) -> list[Kept]:
    """The same, where ranks wait for each other in it: where one runs out of memory, all raise.

    Raises:
        OutOfMemoryError: one did.
    """

    def compute() -> list[Kept]:
        kept = _kept(batch, context, execution)
        execution.group.sum_floats([0.0])  # none goes on before all have come through
        return kept

    kept, _ = recovery.once(f"batch {batch.position.batch} of a prediction", compute)
    if kept is None:
        raise OutOfMemoryError(
            f"rank {execution.group.rank}, or one that it shares the model with, ran out of memory in a prediction. "
            f"Make the micro-batches of its data smaller."
        )
    return kept


def _recording(context: TrainContext, outputs: list[Any]) -> TrainContext:
    """The context with tasks that append to `outputs` what they keep."""

    def recorder(task: Task) -> ObservedTask:
        # a copy, since a view would keep all that it is a part of
        return ObservedTask(
            task, lambda output, batch: outputs.append(pytree.tree_map(_copied, task.predict(output, batch)))
        )

    return replace(context.silently(), tasks={name: recorder(task) for name, task in context.tasks.items()})


def _dummy(context: TrainContext, microbatch: Microbatch) -> MicrobatchStep:
    return MicrobatchStep.dummy(_recording(context, []), microbatch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    if isinstance(leaf, Mapping) or (
        is_dataclass(leaf) and not isinstance(leaf, type)
    ):  # which torch does not look into
        return rebuilt(leaf, partial(pytree.tree_map, _copied))
    return leaf


def _exchanged(
    mine: list[Kept], *, group: Group, wire: Wire, wanting: Sequence[int], holding: Sequence[int]
) -> list[Kept]:
    rank, everything = group.rank, list(mine)
    for other in wanting:
        if other != rank and rank in holding:
            wire.send(Address("prediction", rank, other, 0), mine, other)
    if rank in wanting:
        for other in holding:
            if other != rank:
                received = wire.receive(Address("prediction", other, rank, 0), other)
                # its tensors share one piece of memory, which each would keep alive
                everything += pytree.tree_map(_copied, received)
    wire.flush()
    return sorted(everything, key=lambda kept: kept[0]) if rank in wanting else []
