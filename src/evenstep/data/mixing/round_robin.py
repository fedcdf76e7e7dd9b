"""One task after the other, each for as many updates as its repeat factor says.

An update holds batches of one task only; `AllTasks` holds all of them in one.
"""

from collections.abc import Mapping, Sequence
from typing import final

from evenstep.data.batch import JSON
from evenstep.data.mixing.mixing import Mixing, check_known, checked_repeats


@final
class RoundRobin(Mixing):
    """The tasks in turn.

    Args:
        repeats: updates of a task in each round, by task; 1 by default.

    >>> mixing = RoundRobin(repeats={"box": 2})
    >>> [mixing(number, {"class": 9, "box": 9}, seed=1) for number in range(4)]
    [['class'], ['box'], ['box'], ['class']]
    """

    def __init__(self, *, repeats: Mapping[str, int] | None = None) -> None:
        self._repeats = checked_repeats(repeats)

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        turns = [name for name in sizes for _ in range(self._repeats.get(name, 1))]
        return [turns[number % len(turns)]]

    def check(self, tasks: Sequence[str]) -> None:
        check_known("repeats", self._repeats, tasks)

    def fingerprint(self) -> dict[str, JSON]:
        return {"kind": "round_robin", "repeats": dict(self._repeats)}
