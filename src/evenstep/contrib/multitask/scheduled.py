"""Coefficients that follow a schedule over the run, of the same shapes as learning rates.

λ_t(u) = λ_t · schedule_t(u). Nothing is accumulated, so an aborted or resumed update has the coefficient of its number.
"""

from collections.abc import Mapping, Sequence
from typing import final

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import AnySchedule
from evenstep.schema import Positive
from evenstep.train.tasks.weighting import Coefficients, Fixed, check_tasks


@final
class Scheduled(Coefficients):
    """A number for each task, times a schedule for some.

    Args:
        schedules: by task; a task without one keeps its number.
        values: λ by task; 1 where none is given.

    Raises:
        ArgumentError: a number that is not finite and above 0, or a schedule of more than updates.

    >>> from evenstep.optim.schedules import Constant
    >>> coefficients = Scheduled({"box": Constant(warmup_updates=4)}, values={"box": 2.0})
    >>> coefficients.check(updates=100)
    >>> [coefficients.value("box", update) for update in (1, 2, 4, 9)]
    [0.5, 1.0, 2.0, 2.0]
    """

    are_learned = False

    def __init__(self, schedules: Mapping[str, AnySchedule], *, values: Mapping[str, Positive] | None = None) -> None:
        self._schedules = dict(schedules)
        for name, schedule in self._schedules.items():
            if schedule.needs:
                raise ArgumentError(
                    f"`schedules` of task `{name}` must depend on the number of the update only, but "
                    f"{type(schedule).__name__} follows {', '.join(schedule.needs)}, which only learning rates do; "
                    f"let it count updates, or take another."
                )
        self._numbers = Fixed(values)
        self._updates: int | None = None

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(self._schedules, tasks)
        return self._numbers.build(tasks)

    def check(self, updates: int | None) -> None:
        for schedule in self._schedules.values():
            schedule.check(updates)
        self._updates = updates

    def value(self, task: str, update: int) -> float:
        schedule = self._schedules.get(task)
        return self._numbers.value(task, update) * (1.0 if schedule is None else schedule(update, self._updates))
