"""Every task in every update, some of them several times.

It is what a model with several heads usually wants: no update in which a head has no gradient.
"""

from collections.abc import Mapping, Sequence
from typing import final

from evenstep.data.batch import JSON
from evenstep.data.mixing.mixing import Mixing, check_known, checked_repeats


@final
class AllTasks(Mixing):
    """One batch of each task, or as many as its repeat factor says.

    Args:
        repeats: batches of a task in each update, by task; 1 by default.

    >>> AllTasks(repeats={"box": 2})(0, {"class": 9, "box": 9}, seed=1)
    ['class', 'box', 'box']
    """

    def __init__(self, *, repeats: Mapping[str, int] | None = None) -> None:
        self._repeats = checked_repeats(repeats)

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        return [name for name in sizes for _ in range(self._repeats.get(name, 1))]

    def check(self, tasks: Sequence[str]) -> None:
        check_known("repeats", self._repeats, tasks)

    def fingerprint(self) -> dict[str, JSON]:
        return {"kind": "all", "repeats": dict(self._repeats)}
