"""A multiplier that falls by the same factor at equal distances."""

from dataclasses import dataclass
from typing import final

from evenstep.optim.schedules.schedule import CountedSchedule, check_count, check_min_factor, check_shrink


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step(CountedSchedule):
    """Warm-up to 1, then multiplied by a factor after every so many updates, or epochs.

        min(u / W, 1) · max(γ^⌊n / K⌋, m)    n updates since the warm-up, u - max(W, 1), or epochs, are done

    Args:
        every: K, updates or epochs between two steps.
        factor: γ, what each step multiplies by.
        min_factor: m, below which it does not fall.
        warmup_updates: W, updates of the warm-up; 0 and 1 both mean none.
        unit: what K counts: updates, or epochs.

    Raises:
        ArgumentError: a number out of its range.

    Reference: He et al., "Deep residual learning for image recognition", CVPR 2016, §3.4: divided by 10 at plateaus
    that are known; `torch.optim.lr_scheduler.StepLR` is the case W = 0, m = 0.

    >>> [Step(every=2, factor=0.5)(update, None) for update in range(1, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int
    factor: float = 0.1
    min_factor: float = 0.0

    def __post_init__(self) -> None:
        CountedSchedule.__post_init__(self)
        check_count("every", self.every, at_least=1)
        check_shrink(self.factor, "factor")
        check_min_factor(self.min_factor)

    def after(self, done: int) -> float:
        return max(self.factor ** (done // self.every), self.min_factor)
