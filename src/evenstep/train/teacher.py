"""What the average of a model gives, for tasks that learn from it (mean teachers, self-distillation).

The model is run once more, forward only, with the average's values in the place of its own. In update u that is the
average after update u - 1, the same for every micro-batch, so what is trained does not depend on the cut. How often a
task then asks is its own affair. Where the average is not whole on each rank, all ranks put it together before passes
whose tasks may ask for it, and let go of it after them: one class for each way of holding it.
"""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, final

from torch import Tensor, nn
from torch.func import functional_call

from evenstep.errors import TaskError
from evenstep.internals import buffers_of, parameters_of, places_of, unwrapped
from evenstep.names import plain
from evenstep.nothing import NOTHING
from evenstep.optim.ema import Ema
from evenstep.parallel import Reducers
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.pipeline.whole_model import WholeModel
from evenstep.train.evaluating import evaluating
from evenstep.train.tasks.task import Task
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution


@final
class _OnEachRank:
    """An average that each rank holds whole, of a model that it holds whole."""

    def __init__(self, model: nn.Module, ema: Ema) -> None:
        self._model, self._ema = unwrapped(model), ema

    def held(self, *, everywhere: bool) -> AbstractContextManager[None]:
        """Inside, `called` may be asked as often as a rank needs; all ranks enter together, between passes.

        Args:
            everywhere: on all ranks of a pipeline, not only where losses are.
        """
        return NOTHING

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """A module to call, and with which values in the place of its own.

        Raises:
            TaskError: the average is not whole on this rank now.
        """
        average = self._ema.state_dict()
        # in the formats that the model computes in
        return self._model, {name: average[plain(name)].to(one.dtype) for name, one in _tensors_of(self._model)}


@final
class _InShards:
    """An average in shards, gathered on each rank."""

    def __init__(self, model: nn.Module, ema: Ema, reducers: Reducers) -> None:
        self._model, self._ema, self._reducers = unwrapped(model), ema, reducers
        self._gathered: dict[str, Tensor] | None = None

    @contextmanager
    def held(self, *, everywhere: bool) -> Generator[None]:
        """See `_OnEachRank.held`."""
        with self._ema.swapped(), self._reducers.whole():
            # copies, since the model's own values are gathered into the same memory
            self._gathered = {name: one.detach().clone() for name, one in _tensors_of(self._model)}
        try:
            yield
        finally:
            self._gathered = None

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """See `_OnEachRank.called`."""
        if self._gathered is None:
            raise TaskError(
                "`now.teacher` was asked outside of an update's, an evaluation's or a prediction's batches, when the "
                'average is in shards; ask it in a method that is given a batch, or train with `strategy="ddp"` or '
                '`"zero1"`.'
            )
        return self._model, self._gathered


@final
class _InStages:
    """An average of a model in stages, put together on the rank of the last one, where losses are computed."""

    def __init__(self, model: PipelineModel, ema: Ema, reducers: Reducers, whole: WholeModel) -> None:
        self._ema, self._reducers, self._whole = ema, reducers, whole
        self._of_losses = (model.layout.rank_of[model.last],)
        self._everybody = range(model.mesh.pipeline.ranks)
        self._is_here = False

    @contextmanager
    def held(self, *, everywhere: bool) -> Generator[None]:
        """See `_OnEachRank.held`."""
        ranks = self._everybody if everywhere else self._of_losses
        with self._ema.swapped(), self._reducers.whole():
            contents = self._whole.gathered(ranks=ranks, copied=True)
        with self._whole.filled(contents):
            self._is_here = bool(contents)
            try:
                yield
            finally:
                self._is_here = False

    def called(self) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """See `_OnEachRank.called`."""
        if not self._is_here:
            raise TaskError(
                "`now.teacher` was asked where the average is not: of a model in stages it is whole on the rank of the "
                "last one, while that has batches; ask it in `postprocess`, `loss`, `predict` or `evaluate`."
            )
        return self._whole.in_turn, {}


@final
class Teacher:
    """Runs a model with the values of its average.

    Args:
        reducers: of the model's shards, of which nothing is gathered meanwhile.
    """

    def __init__(self, model: _OnEachRank | _InShards | _InStages, asking: Collection[str], reducers: Reducers) -> None:
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


def build_teacher(tasks: Mapping[str, Task], model: nn.Module, ema: Ema | None, execution: Execution) -> Teacher | None:
    """What gives the average's outputs to the tasks that may ask for them; None where none does."""
    asking = [name for name, task in tasks.items() if task.uses_average]
    reducers, wire = execution.reducers, execution.trainer.peers.wire
    if not asking or ema is None:
        return None
    if isinstance(model, PipelineModel) and wire is not None:
        averaged = _InStages(model, ema, reducers, WholeModel(model, wire))
    elif reducers.layout.divides == "elements":
        averaged = _InShards(model, ema, reducers)
    else:
        averaged = _OnEachRank(model, ema)
    return Teacher(averaged, asking, reducers)


def _in_all_places(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values by the names of all places where their tensors stand, each place once.

    torch finds the further places of a tensor by itself, but a module that stands in two places twice: and then leaves
    the value that it was given in the model.
    """
    places = places_of(model, parameters_of) | places_of(model, buffers_of)
    tensors = [(name, one) for name, one in _tensors_of(model) if name in values]
    return {place: values[name] for name, one in tensors for place in places[id(one)]}


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a model holds of parameters and buffers, by the names that it has now."""
    return chain(model.named_parameters(), model.named_buffers())
