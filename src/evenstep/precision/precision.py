"""In which number formats a model computes: the seam, whose defaults do nothing.

A mode says in which context the forward runs, by what the loss is multiplied before its backward, and what it learns
from an update that was committed or overflowed. Its state is one immutable value, so that the loop can go back to an
earlier one. It is not where gradients are unscaled: the scale is one factor of the update's deferred multiplier.
"""

from abc import ABC
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

_NOTHING = nullcontext()


class Precision(ABC):
    """A precision mode.

    Attributes:
        name: the mode's name in configurations.
        scale: what every loss is multiplied by before its backward.
        lowest_scale: the smallest that `scale` ever becomes.
        retries_overflow: whether inf and NaN gradients may be this mode's own overflow, to be tried again.
    """

    name: ClassVar[str]
    scale: float = 1.0
    lowest_scale: float = 1.0
    retries_overflow: bool = False

    def check(self, device: torch.device) -> None:
        """Raise ArgumentError when `device` can't compute in this mode."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        return _NOTHING

    def committed(self) -> None:
        """An update was committed."""

    def overflowed(self) -> None:
        """An update was aborted because its gradients overflowed in this mode.

        Raises:
            NonFiniteError: there is nothing left to try.
        """

    @property
    def state(self) -> dict[str, float | int | None]:
        """What must be saved for the mode to go on exactly. A new dict each time."""
        return {}

    @state.setter
    def state(self, value: dict[str, float | int | None]) -> None:
        if value:
            raise ValueError(f"precision {self.name} has no state, but is given {sorted(value)}")
