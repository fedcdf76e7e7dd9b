"""Dynamic loss scale, under which an update that overflows is computed again."""

from collections.abc import Mapping
from typing import final


@final
class LossScale:
    """Factor of every loss before its backward.

    float16 loses gradients below 6e-8, so the factor grows while nothing overflows and is halved at an overflow. Unlike
    with GradScaler, the *same* update is tried again at half the scale.

    Args:
        initial, growth_updates, floor: options of `LossScaled`.

    >>> scale = LossScale(initial=4.0, growth_updates=2)
    >>> scale.halve(), scale.value
    (True, 2.0)
    >>> scale.committed(); scale.committed(); scale.value
    4.0
    """

    def __init__(self, *, initial: float = 1.0, growth_updates: int | None = None, floor: float = 1.0) -> None:
        self.value = float(initial)
        self.floor = floor
        self._growth_updates = growth_updates
        self._clean_updates = 0  # committed since the last change of the scale

    def committed(self) -> None:
        """Count a committed update, and perhaps double the scale."""
        self._clean_updates += 1
        if self._clean_updates == self._growth_updates:
            self.value *= 2
            self._clean_updates = 0

    def halve(self) -> bool:
        """Halve the scale after an overflow; False where that would be below the floor."""
        if self.value / 2 < self.floor:
            return False
        self.value /= 2
        self._clean_updates = 0
        return True

    def state_dict(self) -> dict[str, float | int]:
        """The state to be saved; empty for a constant scale."""
        if self._growth_updates is None:
            return {}
        return {"scale": self.value, "clean_updates": self._clean_updates}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        if state:
            self.value = float(state["scale"])
            self._clean_updates = int(state["clean_updates"])
