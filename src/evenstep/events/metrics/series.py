"""Settled values of one metric, ordered by update, in 24 bytes each."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

_SAVED_VALUES = 1000


class Record(NamedTuple):
    """Value of a metric at an update, and the weight behind it: value = Σ sums / Σ weights."""

    update: int
    name: str
    value: float
    weight: float


@final
class Series:
    """Columns of updates, values and weights."""

    __slots__ = ("updates", "values", "weights")

    def __init__(
        self, updates: Iterable[int] = (), values: Iterable[float] = (), weights: Iterable[float] = ()
    ) -> None:
        self.updates = array("q", updates)
        self.values = array("d", values)
        self.weights = array("d", weights)

    def add(self, records: Sequence[Record]) -> None:
        """Insert values, which come by update, each behind those of its update and of earlier ones."""
        if not self.updates or records[0].update >= self.updates[-1]:
            updates, _, values, weights = zip(*records, strict=True)
            self.updates.extend(updates)
            self.values.extend(values)
            self.weights.extend(weights)
            return
        for update, _, value, weight in records:
            place = bisect_right(self.updates, update)
            self.updates.insert(place, update)
            self.values.insert(place, value)
            self.weights.insert(place, weight)

    def keep(self, count: int) -> None:
        """Drop all but the last `count` values."""
        del self.updates[:-count], self.values[:-count], self.weights[:-count]

    def values_before(self, update: int, count: int) -> list[float]:
        """Last `count` values of updates before `update`, or as many as there are."""
        end = bisect_left(self.updates, update)
        return self.values[max(0, end - count) : end].tolist()

    def records(self, name: str, start: int = 0) -> list[Record]:
        """Values from index `start` on, as records of metric `name`."""
        columns = zip(self.updates[start:], self.values[start:], self.weights[start:], strict=True)
        return [Record(update, name, value, weight) for update, value, weight in columns]

    def state(self) -> list[list[Any]]:
        """Newest values as plain lists: the arguments of a new series."""
        return [column[-_SAVED_VALUES:].tolist() for column in (self.updates, self.values, self.weights)]
