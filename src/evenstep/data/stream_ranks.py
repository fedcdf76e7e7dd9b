"""Agreement of the ranks that read streams of unknown length: one small sum per global batch.

An epoch ends for all when the longest stream has ended. Ranks whose streams ended earlier take part without samples,
so nothing is dropped or repeated.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from typing import TypeAlias, final
from zlib import crc32

from evenstep.errors import DataError

Total: TypeAlias = Callable[[Sequence[float]], Sequence[float]]
"""Sums numbers over all ranks; all call it together."""


@final
class StreamRanks:
    """The ranks that read streams for one run.

    Args:
        total: None for one rank, and for ranks that can't ask each other.
        shared: all ranks read the same stream, instead of each its own.
        scaled: samples of a global batch over all ranks, given those of this rank; for ranks that can't ask.
    """

    def __init__(
        self, total: Total | None = None, ranks: int = 1, *, shared: bool = False, scaled: Callable[[int], int] = int
    ) -> None:
        self._total = total if ranks > 1 else None
        self._ranks = 1 if self._total is None else ranks
        self._shared, self._scaled = shared, scaled

    def begun(self, epoch: int, *, gives: bool, over: bool) -> bool:
        """Agree on whether `epoch` exists; False where the data have ended.

        Args:
            gives: this rank's stream gives something in it.
            over: this rank's stream can't be iterated again.
        """
        giving, ended = self._sum(gives, over)
        if self._shared and not {giving, ended} <= {0, self._ranks}:
            raise self._differ(f"in epoch {epoch} that of {int(giving)} ranks gives something")
        if ended == self._ranks:
            return False
        if ended:
            raise DataError(
                f"the streams of {int(ended)} of the {self._ranks} ranks can be iterated only once and have ended, but "
                f"those of the others begin epoch {epoch}; give all ranks an object whose `__iter__` begins anew."
            )
        if not giving:
            raise DataError(
                f"the stream gave nothing in epoch {epoch}; check what it reads. A generator, and what is made of one, "
                "can be iterated only once: give an object whose `__iter__` begins anew."
            )
        return True

    def taken(self, num_samples: int, *, more: bool) -> tuple[int, bool]:
        """Samples of a global batch over all ranks, and whether any rank has more in this epoch."""
        if self._total is None:
            return self._scaled(num_samples), more
        everybodys, having_more, squares = self._sum(num_samples, more, num_samples**2)
        if not self._shared:
            return int(everybodys), having_more > 0
        if squares * self._ranks != everybodys**2 or having_more not in (0, self._ranks):
            mine = f"a global batch has {num_samples} samples here and {everybodys / self._ranks:g} on average, and"
            raise self._differ(f"{mine} {int(having_more)} have more in this epoch")
        return num_samples, more

    def read_the_same(self, items: object) -> bool:
        if self._total is None or self._shared:
            return False
        try:
            mine = float(crc32(pickle.dumps(items)) % 2**20)  # whose square is exact
        except Exception:  # noqa: BLE001 - what can't be pickled can't be compared
            mine = math.nan
        everybodys, squares = self._sum(mine, mine**2)
        return squares * self._ranks == everybodys**2

    def _sum(self, *numbers: float) -> Sequence[float]:
        own = [float(number) for number in numbers]
        return own if self._total is None else self._total(own)

    def _differ(self, what: str) -> DataError:
        return DataError(
            f"all {self._ranks} ranks must read the same stream, of which each takes its micro-batches, but {what}; "
            f"give all the same, whatever their rank."
        )
