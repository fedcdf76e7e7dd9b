"""What a task may ask while its methods are called: the update's number, whether it trains, and the average's outputs.

A task belongs to no update, so all this is read when it is asked: nothing is told to tasks that do not ask. What the
average gives is for `teacher`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import nn

from evenstep.errors import TaskError

if TYPE_CHECKING:
    from evenstep.train.progress import Progress

NOW = "_now"  # where a task has what `Task.now` gives
_CHECKED: ContextVar[bool] = ContextVar("whether losses are being checked", default=False)


@contextmanager
def checking_losses() -> Generator[None]:
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def is_checking_losses() -> bool:
    return _CHECKED.get()


class Asked(Protocol):
    """What an engine says to tasks that ask."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def progress(self) -> "Progress": ...
    def taught(self, inputs: Any) -> Any: ...


@final
class Now:
    """What is so while a method of a task is called.

    Args:
        engine: gives that which the task was given to, or None; it lives no longer for this.
        may_ask: whether the task may ask what the average of the model gives.

    Attributes:
        asks_evaluating: whether the task has asked whether it is evaluated.
    """

    def __init__(self, engine: Callable[[], Asked | None] = lambda: None, *, may_ask: bool = False) -> None:
        self._of, self._may_ask = engine, may_ask
        self.asks_evaluating = False

    def __reduce_ex__(self, protocol: object) -> Any:  # a copy of a task belongs to nobody
        return Now, ()

    @property
    def _engine(self) -> Asked:
        engine = self._of()
        if engine is None:
            raise asked_too_early()
        return engine

    @property
    def is_training(self) -> bool:
        return self._engine.model.training

    @property
    def is_evaluating(self) -> bool:
        self.asks_evaluating = True  # so its loss may be another there, which is looked at as well
        return not (self.is_training or is_checking_losses())

    @property
    def update(self) -> int:
        return self._engine.progress.update + self.is_training

    def teacher(self, inputs: Any) -> Any:
        """What the model gives for `inputs` with the average's parameters and buffers, in evaluation mode.

        No gradient is taken of it, and it draws nothing that the rest of the micro-batch would draw otherwise.

        Args:
            inputs: as `Task.inputs` gives them.

        Raises:
            TaskError: the task has not said `uses_average = True`.
        """
        engine = self._engine
        if not self._may_ask:
            raise TaskError("`now.teacher` is for tasks that say `uses_average = True` in their class; write that.")
        return engine.taught(inputs)


def asked_too_early() -> TaskError:
    """The error for a task that asks `now` where nothing has called it."""
    return TaskError(
        "`now` of a task was asked when there is no trainer or engine that it was given to; ask it in the methods that "
        "these call, such as `loss`."
    )
