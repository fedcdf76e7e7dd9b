"""Forward passes of evaluations, predictions and the check of the loss, and of the average of the parameters."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.func import functional_call

from evenstep import training_mode
from evenstep.data import GlobalBatch, Microbatch, ReadOptions
from evenstep.data.seeding import undisturbed
from evenstep.internals import buffers_of, parameters_of, places_of, unwrapped
from evenstep.optim.ema import Average
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.tensors import plain
from evenstep.train.tasks.task import loss_of
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep, See, Take, TrainContext

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


def run_forwards(
    execution: Execution,
    context: TrainContext,
    work: tuple[Microbatch, ...],
    take: Take,
    *,
    see: See = loss_of,
    path: tuple[int | str, ...],
    kind: str,
    update: int = 0,
    model: nn.Module | None = None,
) -> None:
    """Run micro-batches of one task forward; see `MicrobatchStep`, and `Execution.begin` for `kind`."""
    with MicrobatchStep(context, work, take, see=see, path=path, update=update, model=model) as step:
        execution.begin(step, kind=kind)
        execution.runner.run(execution.forwards(step.numbers), step)


def build_teacher(context: TrainContext, model: nn.Module, average: Average | None) -> Callable[[Any], Any] | None:
    """The function that gives the output of the average for inputs, see `Now.teacher`; None where no task asks."""
    if average is None or not any(task.uses_average for task in context.tasks.values()):
        return None
    model = unwrapped(model)

    def teacher(inputs: Any) -> Any:
        given = inputs if context.cast_inputs is None else context.cast_inputs(inputs)
        positional, named = arguments([], given, True)
        state = average.state_dict()
        places = places_of(model, parameters_of) | places_of(model, buffers_of)
        values = {
            place: state[plain(name)].to(one.dtype)  # in the format that the model computes in
            for name, one in chain(model.named_parameters(), model.named_buffers())
            # torch swaps a module with two places twice, and then leaves the given value in the model
            for place in places[id(one)]
        }
        with (
            evaluating(model, context.device),
            as_written(),
            context.randomness.unkeyed(),
            context.precision.forward(context.device),
        ):
            output = functional_call(model, values, tuple(positional), dict(named), tie_weights=False)
        return context.output(output)

    return teacher
