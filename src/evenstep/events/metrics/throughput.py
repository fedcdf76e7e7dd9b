"""Units of weight and FLOPs, in all and per second, over windows of updates.

    progress/tokens      Σ weights of all updates so far, for a task with `unit = "tokens"`; else progress/weight
    perf/tokens_per_s    Σ weights of the window's updates per second
    perf/flops_per_s     FLOPs of the window's updates per second, over all ranks
    perf/mfu             perf/flops_per_s over the peak of the devices

They follow from settled metrics: only then are the weights of all ranks known.
"""

from collections.abc import Sequence
from typing import final

from evenstep.events.metrics.series import Record


@final
class Throughput:
    """Computes throughput from settled records.

    Args:
        losses: metrics whose weights are counted.
        unit: unit of the weights, such as "tokens".

    Attributes:
        total: Σ weights of all updates so far.
        flops_per_sample: FLOPs of forward and backward; None if they were not counted.
        peak_flops: FLOPs per second of all devices together; None if unknown.

    >>> throughput = Throughput(["train/loss"], "tokens")
    >>> throughput.total = 500.0
    >>> records = [Record(11, "train/loss", 2.0, 60.0), Record(11, "perf/update_s", 0.25, 1.0)]
    >>> [(record.name, record.value) for record in throughput(records)]
    [('progress/tokens', 560.0), ('perf/tokens_per_s', 240.0)]
    """

    def __init__(self, losses: Sequence[str] = (), unit: str = "weight") -> None:
        self._losses = frozenset(losses)
        self._unit = unit
        self.total = 0.0
        self.flops_per_sample: float | None = None
        self.peak_flops: float | None = None
        self.forget()

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        """Records that follow from `records`, which come by update, and within an update in any order."""
        found: list[Record] = []
        own = [one for one in records if one.name in self._losses or one.name.startswith("perf/")]
        # the time of a window may stand before the losses of its last update, which other ranks have put
        for update, name, value, weight in sorted(own, key=lambda one: (one.update, one.name not in self._losses)):
            if name in self._losses:
                self.total += weight
                self._weight += weight
                self._updates.add(update)
            elif name == "perf/samples_per_s" and self.flops_per_sample is not None:
                flops = value * self.flops_per_sample
                found.append(Record(update, "perf/flops_per_s", flops, weight))
                if self.peak_flops is not None:
                    found.append(Record(update, "perf/mfu", flops / self.peak_flops, weight))
            elif name == "perf/update_s" and self._updates:
                seconds = value * len(self._updates)
                found.append(Record(update, f"progress/{self._unit}", self.total, 1.0))
                found.append(Record(update, f"perf/{self._unit}_per_s", self._weight / seconds, seconds))
                self.forget()
        return found

    def forget(self) -> None:
        """Begin a new window."""
        self._weight = 0.0
        self._updates = set[int]()
