"""Dynamic loss scale, under which an update that overflows is computed again."""

from collections.abc import Mapping
from typing import final

from evenstep.errors import NonFiniteError


@final
class LossScale:
    """Factor of every loss before its backward.

    float16 loses gradients below 6e-8, so the factor grows while nothing overflows and is halved at an overflow. Unlike
    with GradScaler, the *same* update is tried again at half the scale.

    Args:
        initial, growth_updates, floor: options of `LossScaled`.
        instead: precision without a scale, for the error at the floor.

    >>> scale = LossScale(initial=4.0, growth_updates=2)
    >>> scale.overflowed(); scale.value
    2.0
    >>> scale.committed(); scale.committed(); scale.value
    4.0
    """

    def __init__(
        self,
        *,
        initial: float = 1.0,
        growth_updates: int | None = None,
        floor: float = 1.0,
        instead: str = "32-true",
    ) -> None:
        self.value = float(initial)
        self.floor = floor
        self._growth_updates = growth_updates
        self._instead = instead
        self._clean_updates = 0  # committed since the last change of the scale

    def committed(self) -> None:
        """Count a committed update, and perhaps double the scale."""
        self._clean_updates += 1
        if self._clean_updates == self._growth_updates:
            self.value *= 2
            self._clean_updates = 0

    def overflowed(self) -> None:
        """Halve the scale; NonFiniteError if that is below the floor."""
        lower = self.value / 2
        if lower < self.floor:
            raise NonFiniteError(
                f"gradients overflow float16 even at a loss scale of {self.value:g}, and half of it would be below "
                f"the floor of {self.floor:g}: the loss has most likely diverged. Lower the learning rate, clip "
                f"gradients, or train with precision '{self._instead}'."
            )
        self.value = lower
        self._clean_updates = 0

    def state_dict(self) -> dict[str, float | int]:
        """The state to be saved; empty for a constant scale."""
        if self._growth_updates is None:
            return {}
        return {"scale": self.value, "clean_updates": self._clean_updates}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        if state:
            self.value = float(state["scale"])
            self._clean_updates = int(state["clean_updates"])
