"""How much each task counts in an update, the λ_t: the seam, and coefficients that stay as they are.

A coefficient is a number that the gradient of a task's loss is multiplied by, or, where it is learned, a function of
parameters of its own that takes part in the loss. It does not look at gradients; what does is in `combine`.
Coefficients that follow a schedule or are learned are in `contrib.multitask`.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor, nn

from evenstep.arguments import advice, require_number, require_table
from evenstep.errors import ArgumentError


class Coefficients(ABC):
    """The λ_t of the tasks.

    Attributes:
        are_learned: whether `weighted` adds parameters of its own to the loss; if not, `value` gives plain numbers,
            which ranks that hold only a part of the model can use as well.
    """

    are_learned: bool = True

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        """Get ready for the tasks of a run; gives the module whose parameters are learned, if there is one.

        Raises:
            ArgumentError: what was said of single tasks is about others.
        """
        return None

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError unless a run of so many updates can follow these."""

    def value(self, task: str, update: int) -> float:
        """The number that the gradient of the task's loss is multiplied by in `update`."""
        return 1.0

    def weighted(self, task: str, loss: Tensor, share: float | Tensor) -> Tensor:
        """A micro-batch's summed loss with its learned coefficient.

        Args:
            loss: summed over the micro-batch.
            share: the micro-batch's weight.
        """
        return loss


def check_tasks(given: Mapping[str, object], tasks: Sequence[str]) -> None:
    """Raise ArgumentError where a coefficient is of no task of the run."""
    for name in given:
        if name not in tasks:
            said = f"`coefficients` names task `{name}`, but the run has {', '.join(tasks)}"
            raise ArgumentError(f"{said}; {advice(name, tasks, 'leave it out.')}")


@final
class Fixed(Coefficients):
    """One number for each task; 1 where none is given.

    Args:
        values: λ by task.

    Raises:
        ArgumentError: a number that is not finite and above 0.

    >>> Fixed({"box": 0.5}).value("box", 1), Fixed().value("class", 1)
    (0.5, 1.0)
    """

    are_learned = False

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        given = require_table("coefficients", values, "`coefficients={'box': 0.5}`", may_be_none=True)
        for name, value in given.items():
            require_number(f"coefficients[{name!r}]", value)
            if not 0 < value < math.inf:
                raise ArgumentError(
                    f"`coefficients` of task `{name}` must be finite and above 0, but is {value}; leave a task out of "
                    f"the mixture to give it no weight.",
                    field="coefficients",
                )
        self._values = {name: float(value) for name, value in given.items()}

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(self._values, tasks)
        return None

    def value(self, task: str, update: int) -> float:
        return self._values.get(task, 1.0)
