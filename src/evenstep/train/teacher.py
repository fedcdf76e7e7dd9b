"""Output of the moving average, for tasks that learn from it (mean teachers, self-distillation).

The model is run once more, forward only, with the average's values in the place of its own. In update u that is the
average after update u - 1, the same for every micro-batch, so the result does not depend on the cut.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from evenstep.internals import buffers_of, parameters_of, places_of, unwrapped
from evenstep.optim.ema import Average
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.tensors import plain
from evenstep.train.forwards import evaluating
from evenstep.train.update.context import TrainContext


def build_teacher(context: TrainContext, model: nn.Module, average: Average | None) -> Callable[[Any], Any] | None:
    """The function that gives the output of the average for inputs, see `Now.teacher`; None where no task asks."""
    if average is None or not any(task.uses_average for task in context.tasks.values()):
        return None
    model = unwrapped(model)

    def teacher(inputs: Any) -> Any:
        given = inputs if context.cast_inputs is None else context.cast_inputs(inputs)
        positional, named = arguments([], given, True)
        state = average.state_dict()
        # in the formats that the model computes in
        values = {name: state[plain(name)].to(one.dtype) for name, one in _tensors_of(model)}
        with (
            evaluating(model, context.device),
            as_written(),
            context.randomness.unkeyed(),
            context.precision.forward(context.device),
        ):
            held = _in_all_places(model, values)
            output = functional_call(model, held, tuple(positional), dict(named), tie_weights=False)
        return output if context.cast_outputs is None else context.cast_outputs(output)

    return teacher


def _in_all_places(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # torch swaps a module with two places twice, and then leaves the given value in the model
    places = places_of(model, parameters_of) | places_of(model, buffers_of)
    return {place: values[name] for name, one in _tensors_of(model) for place in places[id(one)]}


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
