"""Connects a task to the run that calls it: `Task.now`, and the event methods that a task shares with hooks."""

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, final

from evenstep.errors import TaskError
from evenstep.events import Event, Hook

NOW = "_now"
_EVENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_", "on_")))
_dummies = 0  # that run; a plain number, as backwards may run in threads of torch's


@final
class Now:
    """State of the run while a method of a task is called.

    Args:
        caller: gives the engine that the task was given to last, which is referred to weakly.
    """

    def __init__(self, caller: Callable[[], Any] = lambda: None) -> None:
        self._caller = caller

    def __reduce_ex__(self, protocol: object) -> Any:  # a copy of a task belongs to no engine
        return Now, ()

    @property
    def _engine(self) -> Any:
        engine = self._caller()
        if engine is None:
            raise TaskError("`now` has no trainer or engine here; read it in methods such as `loss`.", field="now")
        return engine

    @property
    def is_training(self) -> bool:
        """True if the model is in training mode."""
        return self._engine.model.training

    @property
    def is_evaluating(self) -> bool:
        """True in evaluations and predictions, but not in the loss check."""
        return not (self.is_training or self._engine.parts.check_loss.is_running)

    @property
    def update(self) -> int:
        """Number of the update, counted from 1; in evaluations of the last committed one."""
        return self._engine.progress.update + self.is_training

    def teacher(self, inputs: Any) -> Any:
        """Output of the model for `inputs` with the average's parameters and buffers, in evaluation mode.

        It has no gradient, and its random numbers do not change those of the micro-batch. The class needs
        `uses_average = True`.
        """
        teacher = self._engine.parts.teacher
        if teacher is None:
            raise TaskError("`now.teacher` needs `uses_average = True` in the class of the task.", field="uses_average")
        return teacher(inputs)


def is_dummy_pass() -> bool:
    """True inside a forward or backward that counts nowhere.

    A rank of `fsdp` with fewer micro-batches than others runs dummy passes beside theirs: with gradients of 0, without
    a loss, and changes of buffers are undone. A forward that collects anything elsewhere asks this first.

    >>> is_dummy_pass()
    False
    """
    return _dummies > 0


@contextmanager
def dummy_pass() -> Generator[None]:
    """Inside, `is_dummy_pass` is True."""
    global _dummies
    _dummies += 1
    try:
        yield
    finally:
        _dummies -= 1


def connect(engine: Any, tasks: Mapping[str, Any]) -> None:
    """Let `Task.now` of the tasks be the state of `engine`."""
    for task in tasks.values():
        vars(task)[NOW] = Now(weakref.ref(engine))


def task_hooks(tasks: Mapping[str, Any]) -> list[Hook]:
    """A hook for each task with event methods, such as `before_epoch`."""
    return [TaskHook(name, task) for name, task in tasks.items() if any(hasattr(task, event) for event in _EVENTS)]


@final
class TaskHook(Hook):
    """Calls the event methods of a task; of micro-batches only for its own."""

    failure_policy = "stop"

    def __init__(self, name: str, task: object) -> None:
        self._name = f"task {name or type(task).__name__}"
        for event in _EVENTS:
            if hasattr(task, event):
                setattr(self, event, _for_own_microbatches(name, getattr(task, event)))

    @property
    def name(self) -> str:
        return self._name


def _for_own_microbatches(task: str, method: Callable[[Event], object]) -> Callable[[Event], None]:
    @wraps(method)  # so that its random numbers are keyed as the method's
    def call(event: Any) -> None:
        if getattr(event, "task", task) == task:
            method(event)

    return call
