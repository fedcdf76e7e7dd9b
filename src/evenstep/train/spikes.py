"""Finds updates whose loss lies far above what came before: the run has met something that it may not recover from.

A loss is a spike if it exceeds the median of a window by `threshold` robust standard deviations,

    loss > median + threshold · max(1.4826 · MAD, 0.01 · |median|),

with the median absolute deviation MAD of the window; or if it is not finite. Losses are those of the whole global
batch, so all ranks find the same. It looks at committed updates, after the fact: what is done is the policy's.

Reference: Hampel, "The influence curve and its role in robust estimation", JASA 1974.
"""

import math
import statistics
from collections.abc import Sequence
from typing import final

from evenstep.errors import ArgumentError
from evenstep.events import Incident, Record
from evenstep.options import SPIKE_THRESHOLD, SPIKE_WINDOW_UPDATES
from evenstep.train.failures import FailurePolicy

LOSS = "train/loss"
_TO_STANDARD_DEVIATIONS = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.01


@final
class LossSpikes:
    """Looks for spikes of the training loss.

    Args:
        policy: what is done about one; None only reports it.
        window_updates: how many updates before are compared with.
        threshold: how many robust standard deviations above their median is a spike.

    Raises:
        ArgumentError: a window of less than 8 updates, or a threshold that is not above 0.

    >>> spikes = LossSpikes(window_updates=8)
    >>> history = [Record(update, "train/loss", 1.0 + 0.1 * (update % 3), 8.0) for update in range(1, 9)]
    >>> spikes.first(history, [Record(9, "train/loss", 1.3, 8.0)]) is None
    True
    >>> spikes.first(history, [Record(9, "train/loss", 7.0, 8.0)]).update
    9
    """

    def __init__(
        self,
        policy: FailurePolicy | None = None,
        *,
        window_updates: int = SPIKE_WINDOW_UPDATES,
        threshold: float = SPIKE_THRESHOLD,
    ) -> None:
        if window_updates < 8:
            raise ArgumentError(f"`window_updates` must be at least 8, but is {window_updates}; 128 is usual.")
        if not threshold > 0:
            raise ArgumentError(f"`threshold` must be above 0, but is {threshold}; 10 is careful.")
        self.policy = policy
        self.window_updates = window_updates
        self._threshold = threshold
        self._in_one = False

    def first(self, before: Sequence[Record], records: Sequence[Record]) -> Incident | None:
        """The first of `records` that begins a spike, given the `window_updates` losses before them."""
        values = [record.value for record in before]
        for record in records:
            bound = self._bound(values[-self.window_updates :])
            was, self._in_one = self._in_one, bound is not None and not record.value <= bound
            values.append(record.value)
            if self._in_one and not was:
                return Incident(
                    kind="loss_spike",
                    update=record.update,
                    message=f"the loss of update {record.update} is {record.value:.4g}, above the {bound:.4g} that "
                    f"{self._threshold:g} robust standard deviations over the median of the updates before allow.",
                    details={"loss": record.value if math.isfinite(record.value) else repr(record.value)},
                )
        return None

    def forget(self) -> None:
        """The run has gone back to before the spike."""
        self._in_one = False

    def _bound(self, window: list[float]) -> float | None:
        if len(window) < max(8, self.window_updates // 4):
            return None
        median = statistics.median(window)
        deviation = statistics.median(abs(value - median) for value in window)
        spread = max(_TO_STANDARD_DEVIATIONS * deviation, _LEAST_SPREAD * abs(median))
        return median + self._threshold * spread
