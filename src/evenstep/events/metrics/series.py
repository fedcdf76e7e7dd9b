"""Values of one metric, ordered by update, in 24 bytes each."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final


class Record(NamedTuple):
    """Value of a metric at an update, and the weight behind it: value = Σ sums / Σ weights."""

    update: int
    name: str
    value: float
    weight: float


@final
class Series:
    """Columns of updates, values and weights."""

    __slots__ = ("columns",)

    def __init__(self, columns: Sequence[Iterable[float]] = ((), (), ())) -> None:
        self.columns = array("q", columns[0]), array("d", columns[1]), array("d", columns[2])  # pyright: ignore

    def __len__(self) -> int:
        return len(self.columns[0])

    def add(self, records: Sequence[Record]) -> None:
        """Insert records, which come by update, behind the known values of the same update."""
        updates = self.columns[0]
        is_newest = not updates or records[0].update >= updates[-1]
        for update, _, value, weight in records:
            place = len(updates) if is_newest else bisect_right(updates, update)
            for column, number in zip(self.columns, (update, value, weight), strict=True):
                column.insert(place, number)  # pyright: ignore

    def values_before(self, update: int, count: int) -> list[float]:
        """Last `count` values of updates before `update`, or as many as there are."""
        end = bisect_left(self.columns[0], update)
        return self.columns[1][max(0, end - count) : end].tolist()

    def records(self, name: str, last: int | None = None) -> list[Record]:
        """The last values, or all, as records of metric `name`."""
        start = 0 if last is None else max(0, len(self) - last)
        columns = zip(*(column[start:] for column in self.columns), strict=True)
        return [Record(update, name, value, weight) for update, value, weight in columns]
