"""Forwards over data with an observer of their outputs: evaluations, predictions, and the check of the loss."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from torch import nn

from evenstep.data import Data, GlobalBatch, ReadOptions
from evenstep.parallel import Group
from evenstep.train.evaluating import evaluating
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep, Observer
from evenstep.train.update.weigh import Weights


@contextmanager
def one_epoch(data: Data, model: nn.Module, context: TrainContext, group: Group) -> Generator[Iterator[GlobalBatch]]:
    """The global batches of one epoch, in the data's own order, with the model in evaluation mode.

    Args:
        group: the ranks that share the data.
    """
    options = ReadOptions(seed=context.seed, rank=group.rank, ranks=group.ranks, total=group.sum_floats)
    batches = data.batches(options)
    with evaluating(model, context.device, context.tasks.values()), closing(cast("Any", batches)):
        yield _until_end(batches)


def run_forwards(
    context: TrainContext,
    execution: Execution,
    weights: Weights,
    observer: Observer,
    *,
    path: tuple[int | str, ...],
    kind: str,
    update: int = 0,
    model: nn.Module | None = None,
    watch: Callable[[MicrobatchStep], None] = lambda step: None,
) -> None:
    """Run micro-batches of one task forward.

    Args:
        path: key of the randomness.
        kind: of the micro-batches, see `Execution.pad_passes`.
        model: given to a task that evaluates by itself; None where the model is applied.
        watch: called with each set of micro-batches before it runs.
    """
    if model is None:
        passes = context.cuts.passes(context.tasks, weights.work)
        execution.pad_passes(context, passes, kind=kind, watch=watch)
    with MicrobatchStep(context, weights, observer, path=path, update=update, model=model) as step:
        watch(step)
        execution.evaluator.run(execution.forwards(step.lay_out(weights.work)), step)


def _until_end(batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
    for batch in batches:
        yield batch
        if batch.ends_epoch:
            return
