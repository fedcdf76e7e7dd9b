"""Finds the ranks that the others wait for.

Every update lasts as long as its slowest rank, so what counts is the time that a rank was busy, without its waits for
the others. A rank is a straggler when it was busy twice as long as the median of the others, several times in a row.
It only says so: whether a slow rank is worth a restart is for people.
"""

from collections.abc import Sequence
from typing import final

from evenstep.events import Incident

FACTOR = 2.0
IN_A_ROW = 3
LEAST_S = 0.02  # below that, no update is worth an alarm


@final
class Stragglers:
    """Judges how long the ranks were busy.

    >>> stragglers = Stragglers()
    >>> [len(stragglers.found([0.1, 0.5], update)) for update in (10, 20, 30, 40)]  # said once
    [0, 0, 1, 0]
    """

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}

    def found(self, busy_s: Sequence[float], update: int) -> list[Incident]:
        """Who has become a straggler.

        Args:
            busy_s: seconds per update, by rank; 0 where there was none.
        """
        from statistics import median  # which loads decimal numbers and fractions

        if not any(busy_s):
            return []  # nothing was computed since they were last judged
        incidents: list[Incident] = []
        for rank, busy in enumerate(busy_s):
            others = [theirs for other, theirs in enumerate(busy_s) if other != rank]
            usual = median(others) if others else busy
            slow = usual > 0 and busy > FACTOR * usual and busy - usual > LEAST_S
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if slow else 0
            if self._in_a_row[rank] == IN_A_ROW:
                message = (
                    f"rank {rank} is busy for {busy:.3g} s per update, the others for {usual:.3g} s: all wait for it. "
                    f"Look at its machine (heat, other jobs, its disk or network) or at how the data are shared."
                )
                incidents.append(
                    Incident(kind="straggler", update=update, message=message, details={"busy_s": list(busy_s)})
                )
        return incidents
