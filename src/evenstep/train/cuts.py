"""How finely one rank cuts its micro-batches, because larger ones did not fit into its memory.

A micro-batch that is too large goes through the model in pieces, one after the other: its gradient is the sum of
theirs, so the update is the same. What did not fit once is not tried again: the size of the largest piece allowed is
kept for the rest of the run. It decides how batches are cut, not when, and runs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from evenstep.data import Microbatch
from evenstep.errors import TaskError
from evenstep.train.split import num_elements, num_samples
from evenstep.train.task import Task
from evenstep.train.weigh import weight_of


@final
@dataclass(slots=True)  # not frozen: one is made for every micro-batch, and freezing costs
class Piece:
    """What goes through the model at once.

    Args:
        data: a micro-batch, or a part of one.
        path: which part: () is the whole, (0,) its first half, (0, 1) the second half of that.
    """

    data: Any
    path: tuple[int, ...] = ()


@final
@dataclass(slots=True)
class Cuts:
    """What is known about how much fits.

    Args:
        limit: the most numbers, in all its tensors, that a piece of several samples may hold; None for no limit.
    """

    limit: int | None = None

    def pieces(self, task: Task, data: Any) -> list[Piece]:
        """`data` in pieces within the limit, or of one sample.

        Raises:
            TaskError: the weights of the pieces are not the whole's.
        """
        if self.limit is None:
            return [Piece(data)]
        pieces = self._within(task, Piece(data), self.limit)
        if len(pieces) > 1:
            check_weights(task, data, pieces)
        return pieces

    def passes(self, tasks: Mapping[str, Task], work: tuple[Microbatch, ...]) -> Sequence[Microbatch]:
        """The micro-batches as they go through the model, one after the other."""
        if self.limit is None:
            return work
        return [replace(one, data=piece.data) for one in work for piece in self.pieces(tasks[one.task], one.data)]

    def finer(self, task: Task, piece: Piece) -> bool:
        """Remember that `piece` does not fit; False if it can't be cut."""
        parts = task.split(piece.data)
        if len(parts) < 2:
            return False
        # Where the halves are as large as the whole (a tensor that both share), at least the halving is remembered.
        largest = max(num_elements(part) for part in parts)
        self.limit = min(largest, num_elements(piece.data) - 1, self.limit or largest)
        return True

    def _within(self, task: Task, piece: Piece, limit: int) -> list[Piece]:
        if num_elements(piece.data) <= limit:
            return [piece]
        parts = task.split(piece.data)
        if len(parts) < 2:
            return [piece]
        return [
            small
            for number, part in enumerate(parts)
            for small in self._within(task, Piece(part, (*piece.path, number)), limit)
        ]


def half_of(tasks: Mapping[str, Task], microbatch: Microbatch) -> Microbatch | None:
    """The first half of a micro-batch, or None where it can't be cut."""
    first, *others = tasks[microbatch.task].split(microbatch.data)
    return replace(microbatch, data=first) if others else None


def check_weights(task: Task, whole: Any, pieces: list[Piece]) -> None:
    """Raise TaskError unless the pieces weigh what the whole does: only then is the gradient the same."""
    if task.late_weight:
        return
    wanted = weight_of(task, whole, "a micro-batch")
    weight = math.fsum(weight_of(task, piece.data, "a part of a micro-batch") for piece in pieces)
    if not math.isclose(weight, wanted, rel_tol=1e-6):
        raise TaskError(
            f"a micro-batch of weight {wanted:g} had to be cut to fit into memory, but its {len(pieces)} parts have "
            f"the weight {weight:g} together, so their gradient would be another one; override "
            f"`{type(task).__name__}.split` to say how its batches are cut in two, or lower the micro-batch size."
        )


def described(piece: Piece) -> str:
    """A piece in words."""
    count = num_samples(piece.data)
    return "a micro-batch" if count is None else f"{count} sample{'' if count == 1 else 's'}"
