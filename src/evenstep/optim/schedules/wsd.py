"""A warm-up, a long stable stretch, and a short decay at the end of the run."""

from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Literal, final, get_args

from evenstep.arguments import require_word
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.schedule import (
    LrSchedule,
    check_count,
    check_end_factor,
    check_warmup_fits,
    decay_progress,
    known_updates,
    warmup_factor,
)

DecayShape = Literal["linear", "cosine", "sqrt"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wsd(LrSchedule):
    """Warm-up to 1, stable at 1, then a decay over the last D updates, which reaches its end at the last one.

        u / W                  for u < W
        e + (1 - e) · r(p)     from then on, p = (u - (U - D)) / D, or 0 before that

        r(p) = 1 - p           linear
               (1 + cos(π p)) / 2    cosine
               1 - √p          sqrt

    Args:
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        decay_updates: D, updates of the decay; with 0 there is none, and the run's length need not be known.
        end_factor: e, the multiplier at the last update U; with 0 that update changes nothing.

    Raises:
        ArgumentError: a number out of its range, an unknown shape.

    Reference: Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations",
    NeurIPS 2024, which finds the sqrt shape best.

    >>> schedule = Wsd(warmup_updates=2, decay_updates=2, shape="linear", end_factor=0.0)
    >>> [schedule(update, 6) for update in range(1, 7)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    warmup_updates: int = 0
    decay_updates: int
    shape: DecayShape = "sqrt"
    end_factor: float = 0.1

    def __post_init__(self) -> None:
        check_count("warmup_updates", self.warmup_updates)
        check_count("decay_updates", self.decay_updates)
        check_end_factor(self.end_factor)
        require_word("shape", self.shape, get_args(DecayShape))

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates or self.decay_updates == 0:
            return warmup_factor(update, self.warmup_updates)
        end_update = known_updates(updates, self)
        progress = decay_progress(update, end_update - self.decay_updates, end_update)
        return self.end_factor + (1 - self.end_factor) * _remaining(progress, self.shape)

    def check(self, updates: int | None) -> None:
        if self.decay_updates == 0 and updates is None:
            return
        total = known_updates(updates, self)
        check_warmup_fits(self.warmup_updates, total)
        if self.decay_updates and max(self.warmup_updates, 1) + self.decay_updates > total:
            raise ArgumentError(
                f"`warmup_updates` plus `decay_updates` must be at most the {total} updates of the run, one of them at "
                f"the full learning rate, but are {self.warmup_updates} and {self.decay_updates}; lower them or train "
                f"longer."
            )


def _remaining(progress: float, shape: DecayShape) -> float:
    match shape:
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + cos(pi * progress)) / 2
        case "sqrt":
            return 1 - sqrt(progress)
