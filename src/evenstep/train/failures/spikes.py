"""Finds updates whose loss lies far above what came before: the run has met something that it may not recover from.

A loss is a spike if it exceeds the median of a window by `threshold` robust standard deviations,

    loss > median + threshold · max(1.4826 · MAD, 0.01 · |median|),

with the median absolute deviation MAD of the window; or if it is not finite, in any update. Losses are those of the
whole global batch, so all ranks find the same. It looks at committed updates, after the fact: what is done is the
policy's.

Reference: Hampel, "The influence curve and its role in robust estimation", JASA 1974.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import final

from evenstep.arguments import require_number, require_whole
from evenstep.events import Incident, Record
from evenstep.options import SPIKE_THRESHOLD, SPIKE_WINDOW_UPDATES
from evenstep.train.failures.policy import FailurePolicy

LOSS = "train/loss"
_TO_STANDARD_DEVIATIONS = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.01


_NOT_FINITE = (
    "although its gradient was finite and was applied. Most often a mean over nothing was taken (0 / 0), as where all "
    "labels of a micro-batch are ignored: return the sum, or `Loss.of_mean(mean, count)`, which takes that mean for 0."
)


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
    >>> history = [1.0 + 0.1 * (update % 3) for update in range(1, 9)]
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
        require_whole("window_updates", window_updates, at_least=8, advice="128 is usual")
        require_number("threshold", threshold, "(0, inf]", "above 0", "10 is careful")
        self.policy = policy
        self.window_updates = window_updates
        self._threshold = threshold
        self._in_one = self._told_not_finite = False

    def first(self, before: Sequence[float], records: Sequence[Record]) -> Incident | None:
        """The first of `records` that begins a spike, given the `window_updates` losses before them."""
        window = deque([math.inf if math.isnan(loss) else loss for loss in before], maxlen=self.window_updates)
        ordered = sorted(window)
        for record in records:
            loss = record.value
            bound = self._bound(ordered, loss)
            is_finite = math.isfinite(loss)
            was, self._in_one = self._in_one, not is_finite or (bound is not None and loss > bound)
            if len(window) == self.window_updates:
                ordered.pop(bisect_left(ordered, window[0]))
            sortable = math.inf if math.isnan(loss) else loss
            window.append(sortable)
            insort(ordered, sortable)
            if not self._in_one or was:
                continue
            said = f"the loss of update {record.update} is {loss:.4g}, "
            if is_finite:
                said += (
                    f"above the {bound:.4g} that {self._threshold:g} robust standard deviations over the median of the "
                    f"updates before allow."
                )
            elif self.policy is None and self._told_not_finite:  # what makes it comes again and again
                continue
            else:
                said, self._told_not_finite = said + _NOT_FINITE, True
            details = {"loss": loss if is_finite else repr(loss)}
            return Incident(kind="loss_spike", update=record.update, message=said, details=details)
        return None

    def forget(self) -> None:
        """The run has gone back to before the spike."""
        self._in_one = False

    def _bound(self, ordered: list[float], value: float) -> float | None:
        if len(ordered) < max(8, self.window_updates // 4):
            return None
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        least = _LEAST_SPREAD * abs(median)
        quarter = len(ordered) // 4
        # no more than half of all are nearer to the median than both of these
        nearer = min(median - ordered[quarter], ordered[quarter + len(ordered) // 2] - median)
        if value <= median + self._threshold * max(_TO_STANDARD_DEVIATIONS * nearer, least):
            return None
        deviations = sorted([abs(one - median) for one in ordered])
        deviation = (deviations[(len(ordered) - 1) // 2] + deviations[len(ordered) // 2]) / 2
        return median + self._threshold * max(_TO_STANDARD_DEVIATIONS * deviation, least)
