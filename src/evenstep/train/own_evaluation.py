"""Tasks that evaluate by themselves: they are given the whole model, to generate with it instead of only applying it.

The model is called as an evaluation calls it: in the run's number formats, on the device, without gradients, as it is
written where it is compiled. It takes part in no sum over ranks, so each rank may call it as often as its batches need.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from evenstep.internals import unwrapped
from evenstep.pipeline.compiled import as_written
from evenstep.train.context import TrainContext


@contextmanager
def lent(model: nn.Module, context: TrainContext) -> Generator[nn.Module]:
    """Inside, a task may call the model, which it is given as the trainer was; autocast is the caller's."""
    whole, randomness = unwrapped(model), context.randomness
    cast_inputs, cast_outputs = context.cast_inputs, context.cast_outputs
    handles: list[Any] = []
    if cast_inputs is not None:
        handles.append(
            whole.register_forward_pre_hook(lambda _, args, named: cast_inputs((args, named)), with_kwargs=True)
        )
    if cast_outputs is not None:
        handles.append(whole.register_forward_hook(lambda _, args, output: cast_outputs(output)))
    under_way, randomness.under_way = randomness.under_way, False  # layers are called in no order that has keys
    try:
        with as_written():
            yield whole
    finally:
        randomness.under_way = under_way
        for handle in handles:
            handle.remove()
