"""Coefficients that stay as they are.

They are no schedule: see `Scheduled` for that.
"""

from collections.abc import Mapping, Sequence
from typing import final

from torch import nn

from evenstep.train.coefficients.coefficients import Coefficients, check_positive, check_tasks


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

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values = {name: float(value) for name, value in (values or {}).items()}
        check_positive(self._values)

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(self._values, tasks)
        return None

    def value(self, task: str, update: int) -> float:
        return self._values.get(task, 1.0)
