"""A warm-up, then a power of what is left of the run."""

from dataclasses import dataclass
from typing import final

from evenstep.arguments import require_number
from evenstep.optim.schedules.schedule import Decay


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(Decay):
    """Warm-up to 1, then polynomial decay, which reaches its end at the last update.

        u / W                        for u < W
        e + (1 - e) · (1 - p)ⁿ       from then on, p = (u - s) / (U - s), s = max(W, 1)

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        power: n, above 0; 1 is a straight line, more falls sooner.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range.

    >>> [Polynomial(power=2.0, end_factor=0.0)(update, 3) for update in (1, 2, 3)]
    [1.0, 0.25, 0.0]
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        Decay.__post_init__(self)  # super() does not work in a class with slots before Python 3.14
        require_number("power", self.power, "(0, inf)", "above 0 and finite", "1 to 3 is usual")

    def _remaining(self, progress: float) -> float:
        return (1 - progress) ** self.power
