"""What a task may ask while its methods are called: the update's number, whether it trains, and the average's outputs.

A task belongs to no update, so all this is read when it is asked: nothing is told to tasks that do not ask. The average
is asked by tasks that learn from it (mean teachers, self-distillation): the model is run once more, forward only, with
the average's values. In update u that is the average after update u - 1, the same for every micro-batch, so what is
trained does not depend on the cut.
"""

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.func import functional_call

from evenstep.errors import TaskError
from evenstep.internals import unwrapped
from evenstep.names import plain
from evenstep.optim.ema import Ema
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.train.side_effects import evaluating
from evenstep.train.tasks.task import NOW, Task, asked_too_early

if TYPE_CHECKING:
    from evenstep.train.engine import Engine

_CHECKED: ContextVar[bool] = ContextVar("whether losses are being checked", default=False)


@contextmanager
def checking_losses() -> Generator[None]:
    """Inside, `Now.is_evaluating` is False: what is run forward is what training would run."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


@final
class Now:
    """What is so while a method of a task is called.

    Args:
        engine: gives that which the task was given to, or None; it lives no longer for this.
        ema: the average of the model's parameters, if the task asks it.
    """

    def __init__(self, engine: "Callable[[], Engine | None]" = lambda: None, ema: Ema | None = None) -> None:
        self._of, self._ema = engine, ema

    def __reduce_ex__(self, protocol: object) -> Any:  # a copy of a task belongs to nobody
        return Now, ()

    @property
    def _engine(self) -> "Engine":
        engine = self._of()
        if engine is None:
            raise asked_too_early()
        return engine

    @property
    def is_training(self) -> bool:
        """Whether this is an update; False in evaluations, in predictions, and while losses are checked."""
        return self._engine.model.training

    @property
    def is_evaluating(self) -> bool:
        """Whether this is an evaluation or a prediction: no update, and no check of a loss that is to be trained."""
        return not (self.is_training or _CHECKED.get())

    @property
    def update(self) -> int:
        """The number of the update that is being computed; outside of one, that of the last committed, or 0."""
        return self._engine.progress.update + self.is_training

    def teacher(self, inputs: Any) -> Any:
        """What the model gives for `inputs` with the average's parameters and buffers, in evaluation mode.

        No gradient is taken of it, and it draws nothing that the rest of the micro-batch would draw otherwise.

        Args:
            inputs: as `Task.inputs` gives them.

        Raises:
            TaskError: the task has not said `uses_average = True`.
        """
        context, model = self._engine.parts.context, unwrapped(self._engine.model)
        if self._ema is None:
            raise TaskError("`now.teacher` is for tasks that say `uses_average = True` in their class; write that.")
        given = inputs if context.cast_inputs is None else context.cast_inputs(inputs)
        positional, named = arguments([], given, True)
        under_way, context.randomness.under_way = context.randomness.under_way, False
        try:
            with evaluating(model, context.device), as_written(), context.precision.forward(context.device):
                output = functional_call(model, _values(self._ema, model), tuple(positional), dict(named))
                return output if context.cast_outputs is None else context.cast_outputs(output)
        finally:
            context.randomness.under_way = under_way


def _values(ema: Ema, model: nn.Module) -> dict[str, Tensor]:
    """The average by the names that the model has now, in the formats that it computes in."""
    average: Mapping[str, Tensor] = ema.state_dict()
    live = dict[str, Tensor](model.named_parameters()) | dict(model.named_buffers())
    return {name: average[plain(name)].to(one.dtype) for name, one in live.items()}


def tell(engine: "Engine", tasks: Mapping[str, Task], ema: Ema | None) -> None:
    """Let the tasks ask about the engine that they were given to."""
    for task in tasks.values():
        vars(task)[NOW] = Now(weakref.ref(engine), ema if task.uses_average else None)
