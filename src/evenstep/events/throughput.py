"""Metrics that follow from a window's others: units of weight, and FLOPs, in all and per second.

    progress/tokens      Σ weights of all updates so far, where the task says `unit = "tokens"`; else progress/weight
    perf/tokens_per_s    Σ weights of the updates since the last window, by the seconds that they took
    perf/flops_per_s     the FLOPs of those updates, by their seconds, over all ranks
    perf/mfu             the same, by what the devices could do

Weights are known exactly only when metrics settle, over all ranks and without updates that were given up, so it is
then that these are made. It reads no clock.
"""

from collections.abc import Sequence
from typing import final

from evenstep.events.series import Record


@final
class Throughput:
    """What follows from the metrics of windows of updates.

    Args:
        losses: the names of the metrics whose weights are counted.
        unit: what they count, such as "tokens"; "weight" where nobody has said.

    Attributes:
        total: Σ weights of all updates so far.
        flops_per_sample: of forward and backward; None where they were not counted.
        peak_flops: what all devices together can do in a second; None where that is not known.

    >>> throughput = Throughput(["train/loss"], "tokens")
    >>> throughput.total = 500.0
    >>> records = [Record(11, "train/loss", 2.0, 60.0), Record(11, "perf/update_s", 0.25, 1.0)]
    >>> [(record.name, record.value) for record in throughput(records)]
    [('progress/tokens', 560.0), ('perf/tokens_per_s', 240.0)]
    """

    def __init__(self, losses: Sequence[str] = (), unit: str = "weight") -> None:
        self._losses, self._unit = frozenset(losses), unit
        self._asked = self._losses | {"perf/samples_per_s", "perf/update_s"}
        self.total = 0.0
        self.flops_per_sample: float | None = None
        self.peak_flops: float | None = None
        self.forget()

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        """The records that follow from `records`, which come by update, and within it in any order.

        A window's end is put by the first rank, a loss by the ranks that had work, whose names may come later.
        """
        found: list[Record] = []
        asked = [record for record in records if record[1] in self._asked]
        # a window's weights before its time: those that other ranks alone have put stand last in their update
        for record in sorted(asked, key=lambda one: (one.update, one.name not in self._losses)):
            name = record.name
            if name in self._losses:
                self.total += record.weight
                self._weight += record.weight
                self._updates.add(record.update)
            elif name == "perf/samples_per_s":
                found += self._flops(record)
            elif name == "perf/update_s" and self._updates:
                seconds, update = record.value * len(self._updates), record.update
                found.append(Record(update, f"progress/{self._unit}", self.total, 1.0))
                found.append(Record(update, f"perf/{self._unit}_per_s", self._weight / seconds, seconds))
                self.forget()
        return found

    def forget(self) -> None:
        """A new window begins."""
        self._weight = 0.0
        self._updates = set[int]()

    def _flops(self, samples_per_s: Record) -> list[Record]:
        if self.flops_per_sample is None:
            return []
        update, _, rate, seconds = samples_per_s
        flops = rate * self.flops_per_sample
        found = [Record(update, "perf/flops_per_s", flops, seconds)]
        if self.peak_flops is not None:
            found.append(Record(update, "perf/mfu", flops / self.peak_flops, seconds))
        return found
