"""Global batch sizes that change over a run.

The order of an epoch stays the same, only the cuts move. So nothing is saved, and any position is a place to start.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, cast

from evenstep.data.batch import JSON
from evenstep.errors import ArgumentError

Unit = Literal["updates", "epochs"]


class BatchSizes(NamedTuple):
    """Sizes of the global batches of a run.

    Args:
        begins: the global batch of the run, or the epoch, from 0, that each size begins with; the first is 0.
        sizes: one for each of them, in samples or tokens.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    unit: Unit

    def of_epoch(self, epoch: int) -> int:
        """The size in an epoch, where they change by epochs."""
        return self.sizes[bisect_right(self.begins, epoch) - 1]

    def cut(self, num_samples: int, epoch: int, limit: int | None = None) -> "Begins":
        """The places in the order of an epoch where each of its global batches begins.

        >>> sizes = BatchSizes(begins=(0, 3), sizes=(2, 4), unit="updates")
        >>> [list(sizes.cut(10, epoch)) for epoch in range(2)]  # batches of 2, 2, 2, 4 and 4, 4, 2 samples
        [[0, 2, 4, 6], [0, 4, 8]]
        """
        if self.unit == "epochs":
            return Begins((range(0, num_samples, self.of_epoch(epoch)),))
        return self._cut_from(self._first(num_samples, epoch, limit or num_samples), num_samples)

    def _first(self, num_samples: int, epoch: int, limit: int) -> int:
        number = 0
        for earlier in range(epoch):
            if number >= self.begins[-1]:  # all that follow are of one size
                return number + (epoch - earlier) * min(-(-num_samples // self.sizes[-1]), limit)
            number += min(len(self._cut_from(number, num_samples)), limit)
        return number

    def _cut_from(self, number: int, num_samples: int) -> "Begins":
        pieces: list[range] = []
        place = 0
        while place < num_samples:
            segment = bisect_right(self.begins, number) - 1
            size = self.sizes[segment]
            count = -(-(num_samples - place) // size)
            if segment + 1 < len(self.begins):
                count = min(count, self.begins[segment + 1] - number)
            pieces.append(range(place, place + count * size, size))
            place, number = place + count * size, number + count
        return Begins(tuple(pieces))

    @property
    def as_json(self) -> dict[str, JSON]:
        """The pairs (begin, size) that they were made of, and their unit."""
        return {"unit": self.unit, "sizes": [[n + 1, size] for n, size in zip(self.begins, self.sizes, strict=True)]}


class Begins(Sequence[int]):
    """Several ranges one after the other, as one sequence that is never written out."""

    def __init__(self, pieces: Sequence[range]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(len(piece) for piece in pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        piece = bisect_right(self._ends, number)
        return self._pieces[piece][number - (self._ends[piece - 1] if piece else 0)]


def batch_sizes(name: str, given: object, unit: Unit) -> BatchSizes:
    """Sizes from pairs (begin, size), which are counted from 1.

    >>> batch_sizes("global_batch_size", [(1, 8), (100, 16)], "updates").as_json
    {'unit': 'updates', 'sizes': [[1, 8], [100, 16]]}
    """
    pairs = [tuple(pair) for pair in cast("Sequence[Sequence[int]]", given)]
    begins = [begin for begin, _ in pairs]
    ordered = begins[:1] == [1] and all(one < other for one, other in pairwise(begins))
    if not ordered or any(size < 1 for _, size in pairs):
        raise ArgumentError(
            f"`{name}` must be a whole number, or pairs of a number of {unit} from 1 on, in order, and a size, such as "
            f"[(1, 64), (1000, 128)], but is {given!r}.",
            field=name,
        )
    return BatchSizes(begins=tuple(begin - 1 for begin, _ in pairs), sizes=tuple(size for _, size in pairs), unit=unit)


def largest(size: int | Sequence[tuple[int, int]] | None) -> int | None:
    """The largest of the sizes of global batches over a run.

    >>> largest(8), largest(((1, 8), (100, 32), (200, 16)))
    (8, 32)
    """
    return max(one for _, one in size) if isinstance(size, Sequence) else size
