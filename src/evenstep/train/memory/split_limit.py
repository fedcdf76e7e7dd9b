"""How finely one rank cuts its micro-batches, because larger ones did not fit into its memory.

A micro-batch that is too large goes through the model in pieces, one after the other: its gradient is the sum of
theirs, so the update is the same. What did not fit once is not tried again: the size of the largest piece allowed is
kept for the rest of the run. It decides how batches are cut, not when, and runs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from evenstep.data import Microbatch
from evenstep.data.tree import num_elements
from evenstep.errors import TaskError
from evenstep.train.memory.sub_batch import SubBatch, part_of, parts_of, reason_not_cut, whole_of
from evenstep.train.tasks.task import Task, weight_of

_MEANT_WHOLE = (
    "`check_loss` is False, so its loss may be meant over a micro-batch as a whole (leave `check_loss` True where it "
    "is a sum over samples)"
)


@final
@dataclass(slots=True)
class SplitLimit:
    """What is known about how much fits.

    Args:
        limit: the most numbers, in all its tensors, that a piece of several samples may hold; None for no limit.
        sums: whether losses are known to be sums over samples, or are looked at before the first update. Where they
            are not, one may be meant over its micro-batch as a whole, which only a `split` of the task's own may cut.
    """

    limit: int | None = None
    sums: bool = True

    def pieces(self, task: Task, whole: SubBatch) -> list[SubBatch]:
        """A micro-batch in pieces within the limit, or of one sample.

        Raises:
            TaskError: the weights of the pieces are not the whole's.
        """
        if self.limit is None or self._why_uncut(task):
            return [whole]
        pieces = self._within(task, whole, self.limit)
        if len(pieces) > 1:
            check_weights(task, whole, pieces)
        return pieces

    def passes(self, tasks: Mapping[str, Task], work: tuple[Microbatch, ...]) -> Sequence[Microbatch]:
        """The micro-batches as they go through the model, one after the other."""
        if self.limit is None:
            return work
        return [part_of(one, piece) for one in work for piece in self.pieces(tasks[one.task], whole_of(one))]

    def finer(self, task: Task, piece: SubBatch) -> bool:
        """Remember that `piece` does not fit; False if it can't be cut."""
        parts = [] if self._why_uncut(task) else parts_of(task, piece)
        if len(parts) < 2:
            return False
        # Where the halves are as large as the whole (a tensor that both share), at least the halving is remembered.
        largest = max(num_elements(part.data) for part in parts)
        self.limit = min(largest, num_elements(piece.data) - 1, self.limit or largest)
        return True

    def can_be_cut(self, task: Task, piece: SubBatch) -> bool:
        return not self._why_uncut(task) and len(parts_of(task, piece)) > 1

    def why_whole(self, task: Task, piece: SubBatch) -> str:
        why = self._why_uncut(task) or reason_not_cut(task, piece)
        kind = type(task).__name__
        return f" The engine can't cut this batch: {why}; say how in `{kind}.split`." if why else ""

    def _why_uncut(self, task: Task) -> str:
        if not self.sums and type(task).split is Task.split:
            return _MEANT_WHOLE
        return ""

    def _within(self, task: Task, piece: SubBatch, limit: int) -> list[SubBatch]:
        if num_elements(piece.data) <= limit:
            return [piece]
        parts = parts_of(task, piece)
        if len(parts) < 2:
            return [piece]
        return [small for part in parts for small in self._within(task, part, limit)]


def check_weights(task: Task, whole: SubBatch, pieces: list[SubBatch]) -> None:
    """Raise TaskError unless the pieces weigh what the whole does: only then is the gradient the same."""
    if task.late_weight:
        return
    wanted = weight_of(task, whole.data, "a micro-batch", whole.num_samples)
    weight = math.fsum(weight_of(task, one.data, "a part of a micro-batch", one.num_samples) for one in pieces)
    if not math.isclose(weight, wanted, rel_tol=1e-6):
        raise TaskError(
            f"a micro-batch of weight {wanted:g} had to be cut to fit into memory, but its {len(pieces)} parts have "
            f"the weight {weight:g} together, so their gradient would be another one; override "
            f"`{type(task).__name__}.split` to say how its batches are cut in two, or lower the micro-batch size."
        )
