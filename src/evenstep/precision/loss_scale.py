"""Dynamic loss scale, under which an update that overflows is computed again."""

from collections.abc import Mapping
from typing import final

from evenstep.errors import NonFiniteError

_COUNTS = ("clean_updates", "tries", "overflows")


@final
class LossScale:
    """Factor of every loss before its backward.

    float16 loses gradients below 6e-8, so the factor grows while nothing overflows and is halved at an overflow. Unlike
    with GradScaler, the *same* update is tried again at half the scale. Reference: Micikevicius et al., "Mixed
    precision training", ICLR 2018; tolerance and floor as in fairseq.

    Args:
        initial, growth_updates, tolerance, floor: options of `LossScaled`.
        instead: precision without a scale, for the error at the floor.

    Attributes:
        value: the scale of the next update.
        floor: lower limit of `value`.

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
        tolerance: float = 0.0,
        floor: float = 1.0,
        instead: str = "32-true",
    ) -> None:
        self.value = float(initial)
        self.floor = floor
        self._growth_updates = growth_updates
        self._tolerance = tolerance
        self._instead = instead
        self._scale_after: float | None = None  # scale that follows the update of a tolerated overflow
        self._clean_updates = 0  # committed since the last overflow or change of the scale
        self._tries = 0  # since the last change of the scale
        self._overflows = 0

    def committed(self) -> None:
        """Count a committed update, and perhaps double the scale."""
        self._tries += 1
        self._clean_updates += 1
        if self._scale_after is not None:
            self.value = self._scale_after
            self._scale_after = None
        if self._clean_updates == self._growth_updates:
            self._change(self.value * 2)

    def overflowed(self) -> None:
        """Halve the scale; NonFiniteError if that is below the floor."""
        lower = self.value / 2
        if lower < self.floor:
            raise NonFiniteError(
                f"gradients overflow float16 even at a loss scale of {self.value:g}, and half of it would be below "
                f"the floor of {self.floor:g}: the loss has most likely diverged. Lower the learning rate, clip "
                f"gradients, or train with precision '{self._instead}'."
            )
        self._tries += 1
        self._overflows += 1
        self._clean_updates = 0
        if self._overflows / self._tries < self._tolerance:
            self._scale_after = self.value if self._scale_after is None else self._scale_after
            self.value = lower
        else:
            self._change(lower)

    def _change(self, scale: float) -> None:
        self.value = scale
        self._scale_after = None
        self._clean_updates = 0
        self._tries = 0
        self._overflows = 0

    def state_dict(self) -> dict[str, float | int | None]:
        """The state to be saved; empty for a constant scale."""
        if self._growth_updates is None:
            return {}
        counts = {name: getattr(self, f"_{name}") for name in _COUNTS}
        return {"scale": self.value, "scale_after": self._scale_after, **counts}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        if not state:
            return
        self.value = float(state["scale"] or 0.0)
        self._scale_after = state["scale_after"]
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])
