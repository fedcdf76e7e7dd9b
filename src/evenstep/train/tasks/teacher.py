"""What the average of a model gives, for tasks that learn from it (mean teachers, self-distillation).

The model is run once more, forward only, with the average's values in the place of its own. In update u that is the
average after update u - 1, the same for every micro-batch, so what is trained does not depend on the cut. Where the
average is in shards, all ranks gather it together before passes whose tasks may ask for it, and let go of it after
them: how often a task then asks is its own affair.
"""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.func import functional_call

from evenstep.errors import TaskError
from evenstep.internals import unwrapped
from evenstep.names import plain
from evenstep.optim.ema import Ema
from evenstep.parallel import Reducers
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.train.side_effects import evaluating

if TYPE_CHECKING:
    from evenstep.train.context import TrainContext


@final
class Teacher:
    """Runs a model with the values of its average.

    Args:
        model: on its device, wrapped by the strategy.
        ema: its average.
        asking: the names of the tasks that may ask.
        reducers: they gather what is in shards.
    """

    def __init__(self, model: nn.Module, ema: Ema, asking: Collection[str], reducers: Reducers) -> None:
        self._model, self._ema, self._reducers = unwrapped(model), ema, reducers
        self._asking = frozenset(asking)
        self._in_shards = reducers.layout.divides == "elements"
        self._gathered: dict[str, Tensor] | None = None

    @contextmanager
    def held(self, tasks: Collection[str]) -> Generator[None]:
        """Around passes of tasks of these names, which all ranks make together: those that may ask can do so inside."""
        if not self._in_shards or self._asking.isdisjoint(tasks):
            yield
            return
        with self._ema.swapped(), self._reducers.whole():
            # copies, since the model's own values are gathered into the same memory
            self._gathered = {name: one.detach().clone() for name, one in self._live()}
        try:
            yield
        finally:
            self._gathered = None

    def __call__(self, inputs: Any, context: "TrainContext") -> Any:
        """What the model gives for `inputs`, in evaluation mode, without gradients; see `Now.teacher`."""
        given = inputs if context.cast_inputs is None else context.cast_inputs(inputs)
        positional, named = arguments([], given, True)
        values = self._values()
        under_way, context.randomness.under_way = context.randomness.under_way, False
        try:
            with (
                evaluating(self._model, context.device),
                as_written(),
                context.precision.forward(context.device),
                self._reducers.gathering_nothing(),
            ):
                output = functional_call(self._model, values, tuple(positional), dict(named))
                return output if context.cast_outputs is None else context.cast_outputs(output)
        finally:
            context.randomness.under_way = under_way

    def _values(self) -> dict[str, Tensor]:
        """The average by the names that the model has now, in the formats that it computes in."""
        if not self._in_shards:
            average: Mapping[str, Tensor] = self._ema.state_dict()
            return {name: average[plain(name)].to(one.dtype) for name, one in self._live()}
        if self._gathered is None:
            raise TaskError(
                "`now.teacher` was asked outside of an update's, an evaluation's or a prediction's batches, when the "
                'average is in shards; ask it in a method that is given a batch, or train with `strategy="ddp"` or '
                '`"zero1"`.'
            )
        return self._gathered

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        """What the model holds of parameters and buffers, by the names that it has now."""
        return chain(self._model.named_parameters(), self._model.named_buffers())
