"""Failure policies: they turn incidents into answers, the same on all ranks, which the loop carries out."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import final

from evenstep.arguments import choose, require_whole
from evenstep.events import Incident, Record, Storage
from evenstep.options import MAX_REWINDS, SPIKE_THRESHOLD, SPIKE_WINDOW_UPDATES, Failures

LOSS = "train/loss"
_MAX_BATCHES_WITHOUT_WEIGHT = 100
_TO_STANDARD_DEVIATIONS = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.01


@final
class Answer(StrEnum):
    """Answer to an incident."""

    STOP = "stop"  # end the run with an error; everything before the update is kept
    SKIP = "skip"  # give its global batch up and go on with the next one; the update count does not move
    RETRY = "retry"  # try the same update again
    REWIND = "rewind"  # go back to the last checkpoint before it, in place
    REWIND_PAST = "rewind_past"  # go back, and give up the global batches from there to the offending one

    @property
    def rewinds(self) -> bool:
        return self in (Answer.REWIND, Answer.REWIND_PAST)


_LIMITS = {"stop": 1, "skip": 10, "retry": 1, "rewind": MAX_REWINDS, "rewind_past": MAX_REWINDS}


class FailurePolicy:
    """Gives one answer to incidents of one kind, until there are too many; it belongs to one trainer, as it counts.

    Args:
        answer: "stop", "skip", "retry", "rewind" or "rewind_past".
        limit: how often it is given before the run stops: for rewinds in all, else in a row for the same update. By
            default 10 batches are skipped, one is retried, and 3 rewinds are made.
    """

    answer: Answer = Answer.STOP

    def __init__(self, answer: str, *, limit: int | None = None) -> None:
        self.answer = choose("answer", answer, {str(one): one for one in Answer})
        self._limit = _LIMITS[self.answer] if limit is None else require_whole("limit", limit, at_least=1)
        self._update = self._count = 0

    def __call__(self, incident: Incident) -> Answer:
        """The answer to an incident; the same on all ranks."""
        goes_on = self.answer.rewinds or incident.update == self._update
        self._count = self._count + 1 if goes_on else 1
        self._update = incident.update
        return self.answer if self._count <= self._limit else Answer.STOP


@final
class LossSpikes:
    """Looks for spikes of the training loss, over the whole global batch, among committed updates.

    A loss is a spike if it exceeds the median of a window by `threshold` robust standard deviations,

        loss > median + threshold · max(1.4826 · MAD, 0.01 · |median|),

    with the median absolute deviation MAD of the window; or if it is not finite, in any update.

    Args:
        policy: the answer to a spike; None only reports it.
        window_updates: number of earlier updates that a loss is compared with, at least 8.
        threshold: robust standard deviations above their median.

    Reference: Hampel, "The influence curve and its role in robust estimation", JASA 1974.

    >>> LossSpikes(window_updates=8).first([1.0] * 8, [Record(9, "train/loss", 7.0, 8.0)]).update
    9
    """

    def __init__(
        self,
        policy: FailurePolicy | None = None,
        *,
        window_updates: int = SPIKE_WINDOW_UPDATES,
        threshold: float = SPIKE_THRESHOLD,
    ) -> None:
        self.policy = policy
        self.window_updates = window_updates
        self._threshold = threshold
        self.in_spike = False
        self._has_reported_not_finite = False

    def first(self, before: Sequence[float], records: Sequence[Record]) -> Incident | None:
        """The first of `records` that begins a spike, given the `window_updates` losses before them."""
        window = deque([_sortable(loss) for loss in before], maxlen=self.window_updates)
        ordered = sorted(window)
        for record in records:
            bound = self._bound(ordered, record.value)
            was_in_spike = self.in_spike
            self.in_spike = not math.isfinite(record.value) or (bound is not None and record.value > bound)
            if len(window) == self.window_updates:
                ordered.pop(bisect_left(ordered, window[0]))
            window.append(_sortable(record.value))
            insort(ordered, window[-1])
            incident = self._incident(record, bound) if self.in_spike and not was_in_spike else None
            if incident is not None:
                return incident
        return None

    def _incident(self, record: Record, bound: float | None) -> Incident | None:
        loss = record.value
        is_finite = math.isfinite(loss)
        if not is_finite and self.policy is None and self._has_reported_not_finite:  # it comes again and again
            return None
        if is_finite:
            why = f"above {bound:.4g}: {self._threshold:g} robust standard deviations over the median of the last ones."
        else:
            self._has_reported_not_finite = True
            why = (
                "although its gradient was finite and was applied. Most often a mean over nothing was taken (0 / 0): "
                "return the sum, or `Loss.of_mean(mean, count)`."
            )
        message = f"the loss of update {record.update} is {loss:.4g}, {why}"
        details = {"loss": loss if is_finite else repr(loss)}
        return Incident(kind="loss_spike", update=record.update, message=message, details=details)

    def _bound(self, ordered: list[float], value: float) -> float | None:
        if len(ordered) < max(8, self.window_updates // 4):
            return None
        median = _median(ordered)
        least = _LEAST_SPREAD * abs(median)
        # at most half of all are nearer to the median than both quartiles: saves most losses 40 µs of sorting
        quarter = len(ordered) // 4
        nearer = min(median - ordered[quarter], ordered[quarter + len(ordered) // 2] - median)
        bound = median + self._threshold * max(_TO_STANDARD_DEVIATIONS * nearer, least)
        if value <= bound:
            return bound
        deviation = _median(sorted([abs(one - median) for one in ordered]))
        return median + self._threshold * max(_TO_STANDARD_DEVIATIONS * deviation, least)


def _sortable(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _median(ordered: list[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@final
class Policies:
    """The policies of a run.

    Attributes:
        non_finite: for gradients that are inf or NaN.
        spikes: looks for losses far above those before; None does not look.
    """

    def __init__(self, failures: Failures) -> None:
        def policy(given: FailurePolicy | str) -> FailurePolicy:
            if not isinstance(given, str):
                return given
            return FailurePolicy(given, limit=failures.max_rewinds if Answer(given).rewinds else None)

        spikes = failures.loss_spike
        self.non_finite = policy(failures.non_finite)
        self.spikes: LossSpikes | None = None
        if spikes != "ignore":
            self.spikes = LossSpikes(
                None if spikes == "report" else policy(spikes),
                window_updates=failures.spike_window_updates,
                threshold=failures.spike_threshold,
            )
        self._no_weight = FailurePolicy("skip", limit=_MAX_BATCHES_WITHOUT_WEIGHT)

    @property
    def kept(self) -> dict[str, object]:
        """Policies by the option that they were given for."""
        return {"non_finite": self.non_finite, "loss_spike": self.spikes and self.spikes.policy}

    @property
    def rewinding(self) -> list[str]:
        """Options whose policy goes back to a checkpoint."""
        return [name for name, one in self.kept.items() if isinstance(one, FailurePolicy) and one.answer.rewinds]

    def about_abort(self, incident: Incident) -> Answer:
        if incident.kind == "overflow":
            return Answer.RETRY  # at a lower loss scale
        return (self._no_weight if incident.kind == "no_weight" else self.non_finite)(incident)

    def about_spikes(self, records: Sequence[Record], storage: Storage) -> tuple[Incident, Answer | None] | None:
        """The first spike among the records of a window, and the answer; None if it is only reported."""
        spikes = self.spikes
        losses = [record for record in records if record.name == LOSS]
        if spikes is None or not losses:
            return None
        before = storage.values_before(losses[0].update, LOSS, spikes.window_updates)
        incident = spikes.first(before, losses)
        if incident is None:
            return None
        return incident, None if spikes.policy is None else spikes.policy(incident)
