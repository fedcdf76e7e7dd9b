"""What the average of a model gives, for tasks that learn from it (mean teachers, self-distillation).

The model is run once more, forward only, with the average's values in the place of its own. In update u that is the
average after update u - 1, the same for every micro-batch, so what is trained does not depend on the cut. How often a
task then asks is its own affair; where the average is in parts, it is put together before (`averaged`).
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor, nn
from torch.func import functional_call

from evenstep.internals import buffers_of, parameters_of, places_of
from evenstep.nothing import NOTHING
from evenstep.parallel import Reducers
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.train.side_effects import evaluating
from evenstep.train.tasks.averaged import AveragedModel, tensors_of
from evenstep.train.update.context import TrainContext


@final
class Teacher:
    """Runs a model with the values of its average.

    Args:
        reducers: of the model's shards, of which nothing is gathered meanwhile.
    """

    def __init__(self, model: AveragedModel, asking: Collection[str], reducers: Reducers) -> None:
        self._model, self._reducers = model, reducers
        self._asking = frozenset(asking)

    def held(self, *tasks: str, everywhere: bool = False) -> AbstractContextManager[None]:
        """Around passes of tasks of these names, which all ranks make together: those that may ask can do so inside.

        Args:
            everywhere: on all ranks of a pipeline, not only where losses are.
        """
        return NOTHING if self._asking.isdisjoint(tasks) else self._model.held(everywhere=everywhere)

    def __call__(self, inputs: Any, context: TrainContext) -> Any:
        """What the model gives for `inputs`, in evaluation mode, without gradients; see `Now.teacher`."""
        given = inputs if context.cast_inputs is None else context.cast_inputs(inputs)
        positional, named = arguments([], given, True)
        model, values = self._model.called()
        under_way, context.randomness.under_way = context.randomness.under_way, False
        try:
            with (
                evaluating(model, context.device),
                as_written(),
                context.precision.forward(context.device),
                self._reducers.gathering_nothing(),
            ):
                held = _in_all_places(model, values)
                output = functional_call(model, held, tuple(positional), dict(named), tie_weights=False)
                return output if context.cast_outputs is None else context.cast_outputs(output)
        finally:
            context.randomness.under_way = under_way


def _in_all_places(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values by the names of all places where their tensors stand, each place once.

    torch finds the further places of a tensor by itself, but a module that stands in two places twice: and then leaves
    the value that it was given in the model.
    """
    places = places_of(model, parameters_of) | places_of(model, buffers_of)
    tensors = [(name, one) for name, one in tensors_of(model) if name in values]
    return {place: values[name] for name, one in tensors for place in places[id(one)]}
