"""A dynamic loss scale, for modes whose gradients are float16 on their way back.

float16 loses gradients below 6e-8, so the loss is multiplied by a scale that grows while nothing overflows and is
halved when something does. Reference: Micikevicius et al., "Mixed precision training", ICLR 2018; tolerance and
floor as in fairseq. It is not torch's GradScaler: an overflow aborts the update and the *same* update is tried again
at half the scale, so the data, the update count and the LR schedule never notice. A gradient that is not finite at any
scale, such as that of a bad batch, is no overflow, and leaves the scale as it is: telling them apart is
`evenstep.train`'s.
"""

from typing import Any, ClassVar

from evenstep.arguments import require_number, require_whole
from evenstep.errors import ArgumentError, NonFiniteError
from evenstep.precision.precision import Precision


class LossScaled(Precision):
    """A mode with a dynamic loss scale.

    Args:
        initial: the first scale.
        growth_updates: the scale is doubled after this many committed updates without an overflow.
        tolerance: share of tries since the last change of the scale that may overflow without lowering it for good.
            A tolerated overflow lowers it for the update that is tried again only. 0 tolerates none.
        floor: the smallest scale; an overflow at which the half of it would be below this stops the run.

    Attributes:
        instead: the mode without a scale that is most like this one.

    Raises:
        ArgumentError: a number is out of its range.
    """

    retries_overflow = True
    instead: ClassVar[str]

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth_updates: int = 2000,
        tolerance: float = 0.0,
        floor: float = 1e-4,
    ) -> None:
        require_number("initial", initial, "(0, inf)", "finite and above 0", "65536 is usual")
        require_number("floor", floor, "(0, inf]", "above 0", "0.0001 is usual")
        if floor > initial:
            raise ArgumentError(f"`floor` must be at most the `initial` of {initial:g}, but is {floor:g}; lower it.")
        require_whole("growth_updates", growth_updates, at_least=1, advice="2000 is usual")
        require_number("tolerance", tolerance, "[0, 1)", "in [0, 1)", "0 tolerates no overflow")
        self._initial = float(initial)
        self._growth_updates = growth_updates
        self._tolerance = tolerance
        self.lowest_scale = floor
        self.scale = float(initial)
        self._scale_after: float | None = None  # the scale that a tolerated overflow has lowered for one update
        self._clean_updates = 0  # committed since the last overflow or change of the scale
        self._tries = 0  # since the last change of the scale
        self._overflows = 0

    def committed(self) -> None:
        self._tries += 1
        self._clean_updates += 1
        if self._scale_after is not None:
            self.scale, self._scale_after = self._scale_after, None
        if self._clean_updates == self._growth_updates:
            self._change(self.scale * 2)

    def overflowed(self) -> None:
        lower = self.scale / 2
        if lower < self.lowest_scale:
            raise NonFiniteError(
                f"gradients overflow float16 even at a loss scale of {self.scale:g}, and half of it would be below "
                f"the floor of {self.lowest_scale:g}: the loss has most likely diverged. Lower the learning rate, clip "
                f"gradients, or train with precision '{self.instead}'; a lower `floor` only helps if gradients are "
                f"really that large."
            )
        self._tries += 1
        self._overflows += 1
        self._clean_updates = 0
        if self._overflows / self._tries < self._tolerance:
            self._scale_after = self.scale if self._scale_after is None else self._scale_after
            self.scale = lower
        else:
            self._change(lower)

    def _change(self, scale: float) -> None:
        self.scale, self._scale_after = scale, None
        self._clean_updates = self._tries = self._overflows = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **super().settings,
            "initial": self._initial,
            "growth_updates": self._growth_updates,
            "tolerance": self._tolerance,
            "floor": self.lowest_scale,
        }

    @property
    def state(self) -> dict[str, float | int | None]:
        return {
            "scale": self.scale,
            "scale_after": self._scale_after,
            "clean_updates": self._clean_updates,
            "tries": self._tries,
            "overflows": self._overflows,
        }

    @state.setter
    def state(self, value: dict[str, float | int | None]) -> None:
        scale, scale_after = value["scale"], value["scale_after"]
        assert scale is not None
        self.scale = float(scale)
        self._scale_after = None if scale_after is None else float(scale_after)
        self._clean_updates = int(value["clean_updates"] or 0)
        self._tries = int(value["tries"] or 0)
        self._overflows = int(value["overflows"] or 0)
