"""How the streams of several ranks make one global batch, and one epoch, though nobody knows how long they are.

An epoch ends for all when the last rank's stream has ended: those that ended earlier take part without samples until
then, so nothing is dropped, repeated or waited for. Ranks agree by one small sum per global batch. What is read is not
known here.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from typing import TypeAlias, final
from zlib import crc32

from evenstep.errors import DataError

Total: TypeAlias = Callable[[Sequence[float]], Sequence[float]]
"""Sums numbers over all ranks; all call it together."""


class StreamRanks:
    """The ranks that read streams for one run; here one rank, or one that can't ask the others.

    Args:
        scaled: the samples of a global batch over all ranks, for those of this one, if all streams are alike.
    """

    def __init__(self, scaled: Callable[[int], int] = int) -> None:
        self._scaled = scaled

    def begun(self, epoch: int, *, gives: bool, over: bool) -> bool:
        """Whether there is such an epoch; False where the data have come to their end.

        Args:
            epoch: that every rank has tried to begin.
            gives: whether this rank's stream gives something in it.
            over: whether it can't be iterated again.
        """
        if gives or over:
            return gives
        raise _nothing_in(epoch)

    def taken(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        """The samples of a global batch over all ranks, and whether any rank has more in this epoch.

        Args:
            more: whether this rank has more.
        """
        return self._scaled(num_samples), more

    def read_the_same(self, items: object) -> bool:
        """Whether all ranks, which should each have others, have read the same items."""
        return False


@final
class Together(StreamRanks):
    """Ranks that each read a stream of their own, of any length.

    Args:
        total: sums over them.
    """

    def __init__(self, total: Total, ranks: int) -> None:
        super().__init__()
        self._total, self._ranks = total, ranks

    def begun(self, epoch: int, *, gives: bool, over: bool) -> bool:
        giving, ended = self._total([float(gives), float(over)])
        if ended == self._ranks:
            return False
        if ended:
            raise DataError(
                f"the streams of {int(ended)} of the {self._ranks} ranks can be iterated only once and have ended, but "
                f"those of the others begin epoch {epoch}; give all ranks an object whose `__iter__` begins anew."
            )
        if not giving:
            raise _nothing_in(epoch)
        return True

    def taken(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        everybodys, having_more = self._total([float(num_samples), float(more)])
        return int(everybodys), having_more > 0

    def read_the_same(self, items: object) -> bool:
        try:
            mine = float(crc32(pickle.dumps(items)) % 2**20)  # whose square is exact
        except Exception:  # noqa: BLE001 - what can't be pickled can't be compared
            mine = math.nan
        everybodys, squares = self._total([mine, mine**2])
        return squares * self._ranks == everybodys**2


@final
class _Alike(StreamRanks):
    def __init__(self, total: Total, ranks: int) -> None:
        super().__init__()
        self._total, self._ranks = total, ranks

    def begun(self, epoch: int, *, gives: bool, over: bool) -> bool:
        giving, ended = self._total([float(gives), float(over)])
        if giving not in (0, self._ranks) or ended not in (0, self._ranks):
            raise self._differ(f"in epoch {epoch} that of {int(giving)} ranks gives something")
        return super().begun(epoch, gives=gives, over=over)

    def taken(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        everybodys, having_more, squares = self._total([float(num_samples), float(more), float(num_samples) ** 2])
        if squares * self._ranks != everybodys**2 or having_more not in (0, self._ranks):
            mine = f"a global batch has {num_samples} samples here and {everybodys / self._ranks:g} on average, and"
            raise self._differ(f"{mine} {int(having_more)} have more in this epoch")
        return num_samples, more

    def _differ(self, what: str) -> DataError:
        return DataError(
            f"all {self._ranks} ranks must read the same stream, of which each takes its micro-batches, but {what}; "
            f"give all the same, whatever their rank."
        )


def of_one_stream(total: Total | None, ranks: int) -> StreamRanks:
    """The ranks that all read one stream; without a `total` they take it for granted that it is the same."""
    return StreamRanks() if total is None or ranks == 1 else _Alike(total, ranks)


def _nothing_in(epoch: int) -> DataError:
    return DataError(
        f"the stream gave nothing in epoch {epoch}; check what it reads. A generator, and what is made of one, "
        "can be iterated only once: give an object whose `__iter__` begins anew."
    )
