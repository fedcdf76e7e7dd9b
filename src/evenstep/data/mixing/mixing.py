"""Which tasks an update takes batches of: the seam.

A way of mixing is a pure function of the run's seed and the number of the global batch, so all ranks agree on it
without a word and a resumed run goes on with it. It knows nothing of samples, nor of which task has run out of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from evenstep.arguments import require_table
from evenstep.data.batch import JSON
from evenstep.errors import ArgumentError


class Mixing(ABC):
    """Chooses the batches of each update."""

    @abstractmethod
    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        """The tasks that global batch `number` takes one batch of each; a task named twice gives two.

        Args:
            number: of the global batch in the whole run, from 0.
            sizes: of the tasks that have something to give now, in the mixture's order: their batches per epoch.
        """

    def check(self, tasks: Sequence[str]) -> None:
        """Raise ArgumentError unless what was said of single tasks is about `tasks`."""

    @abstractmethod
    def fingerprint(self) -> dict[str, JSON]:
        """What must be equal for a resumed run to be exact."""


def checked_repeats(repeats: Mapping[str, int] | None) -> dict[str, int]:
    """The repeat factors.

    Raises:
        ArgumentError: one is not a whole number of at least 1.

    >>> checked_repeats({"box": 2}), checked_repeats(None)
    ({'box': 2}, {})
    """
    for name, count in require_table("repeats", repeats, "`repeats={'box': 2}`", may_be_none=True).items():
        if type(count) is not int or count < 1:
            raise ArgumentError(f"`repeats` of task `{name}` must be a whole number of at least 1, but is {count!r}.")
    return dict(repeats or {})


def check_known(argument: str, given: Mapping[str, object], tasks: Sequence[str]) -> None:
    """Raise ArgumentError where `given` names a task that is not among `tasks`."""
    for name in given:
        if name not in tasks:
            raise ArgumentError(f"`{argument}` names task `{name}`, but the mixture has {', '.join(tasks)}; rename it.")
