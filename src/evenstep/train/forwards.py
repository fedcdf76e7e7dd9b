"""Forward passes over data with an observer of their outputs: evaluations, predictions, and the check of the loss."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from evenstep import training_mode
from evenstep.data import GlobalBatch, ReadOptions
from evenstep.data.seeding import undisturbed
from evenstep.parallel import Group
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep

Read: TypeAlias = Callable[[ReadOptions], Iterator[GlobalBatch]]
"""Gives global batches, as `Data.batches` does."""


@contextmanager
def evaluating(model: nn.Module, device: torch.device, tasks: Iterable[object] = ()) -> Generator[None]:
    """Evaluation mode without gradients, also of networks that tasks hold; modes and generators are restored."""
    values = [value for task in tasks for value in (task, *getattr(task, "__dict__", {}).values())]
    models = [*(value for value in values if isinstance(value, nn.Module)), model]
    modes = {part: part.training for one in models for part in one.modules()}
    for one in models:
        one.eval()
    try:
        with torch.no_grad(), undisturbed(device):
            yield
    finally:
        training_mode.put_back(modes)


@contextmanager
def one_epoch(read: Read, model: nn.Module, context: TrainContext, group: Group) -> Generator[Iterator[GlobalBatch]]:
    """The global batches of one epoch for the ranks of `group`, with the model in evaluation mode."""
    batches = read(ReadOptions(seed=context.seed, rank=group.rank, ranks=group.ranks, total=group.sum_floats))

    def until_end() -> Iterator[GlobalBatch]:
        for batch in batches:
            yield batch
            if batch.ends_epoch:
                return

    with evaluating(model, context.device, context.tasks.values()), closing(cast("Any", batches)):
        yield until_end()


def run_forwards(execution: Execution, step: MicrobatchStep, *, kind: str) -> None:
    """Run micro-batches of one task forward; of one `kind` are those that go through the same parts of a model."""
    with step:
        execution.begin(step, kind=kind)
        execution.evaluator.run(execution.forwards(step.numbers), step)
