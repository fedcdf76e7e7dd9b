"""Tasks are told what hooks are told, by methods of the same names: `before_epoch`, `before_evaluate`, and all others.

A task that has such a method is heard before the hooks are. Of single micro-batches it is told of its own only; of all
else every task is. What it raises ends the run, as what its other methods raise does.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, final

from evenstep.errors import ArgumentError
from evenstep.events import Event, Hook
from evenstep.train.tasks.now import NOW, Asked, Now
from evenstep.train.tasks.task import Task

MOMENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_", "on_")))
"""The names of the methods that a task may have beside those of `Task`."""

_OF_A_TRAINER = tuple(name for name in MOMENTS if name.endswith(("_train", "_epoch", "_save", "_incident")))


def heard(task: Task) -> list[str]:
    return [name for name in MOMENTS if hasattr(task, name)]


def listeners(tasks: Mapping[str, Task]) -> list[Hook]:
    return [TaskListener(name, task) for name, task in tasks.items() if heard(task)]


def let_ask(engine: Asked, tasks: Mapping[str, Task]) -> None:
    """Let the tasks ask about the engine that they were given to."""
    for task in tasks.values():
        vars(task)[NOW] = Now(weakref.ref(engine), may_ask=task.uses_average)


def check_told_by_engine(tasks: Mapping[str, Task]) -> None:
    """Raise ArgumentError for a method that an engine, which knows single updates only, would never call."""
    for task in tasks.values():
        silent = [name for name in heard(task) if name in _OF_A_TRAINER]
        if silent:
            raise ArgumentError(
                f"`{type(task).__name__}.{silent[0]}` would never be called: an engine is told of single updates and "
                f"evaluations. Train with a `Trainer`, or give the method another name and call it in your loop."
            )


@final
class TaskListener(Hook):
    """A hook that hands on to a task what it is told."""

    failure_policy = "stop"

    def __init__(self, name: str, task: Task) -> None:
        self._called = f"task {name or type(task).__name__}"
        for moment in heard(task):
            setattr(self, moment, _of_own(name, getattr(task, moment)))

    @property
    def name(self) -> str:
        return self._called


def _of_own(name: str, method: Callable[[Event], object]) -> Callable[[Event], None]:
    @wraps(method)  # what it draws is keyed as what it is, not as what hands it on
    def told(event: Any) -> None:
        if not hasattr(type(event), "task") or event.task == name:  # the event itself would answer with a message
            method(event)

    return told
