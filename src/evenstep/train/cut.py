"""Cuts of micro-batches that do not fit into a rank's memory: the gradient is the sum of those of the pieces.

A size that did not fit once is not tried again in the run. `Task.split` cuts a batch; by default along the samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

from evenstep.arguments import said
from evenstep.data import Microbatch
from evenstep.data.split import cuttable_samples, half_of_samples, num_samples, samples_of, samples_of_parts
from evenstep.data.tree import num_elements
from evenstep.errors import TaskError
from evenstep.train.tasks.task import Task, weight_of


@final
@dataclass(slots=True)  # not frozen: one is made for every micro-batch, and freezing costs
class SubBatch:
    """A micro-batch, or a part of one, that goes through the model at once.

    Args:
        path: of the part: () is the whole, (0,) its first half, (0, 1) the second half of that.
        num_samples: None where it is not known.
        cut_from: the batch that the engine cut it from, its number of samples, and this piece's first and end.
        in_columns: of the micro-batch.
    """

    data: Any
    path: tuple[int, ...] = ()
    num_samples: int | None = None
    cut_from: tuple[Any, int, int, int] | None = None
    in_columns: bool = False

    @property
    def title(self) -> str:
        count = num_samples(self.data, self.num_samples)
        return "a micro-batch" if count is None else f"{count} sample{'' if count == 1 else 's'}"


@final
@dataclass(slots=True)
class SplitLimit:
    """Largest size that fits.

    Args:
        limit: largest number of elements, in all its tensors, of a piece of several samples; None for no limit.
        sums: False if losses are not checked to be sums over samples: one may be meant over its micro-batch as a whole,
            which only a `split` of the task's own may cut.
    """

    limit: int | None = None
    sums: bool = True

    def pieces(self, task: Task, whole: SubBatch) -> list[SubBatch]:
        """A micro-batch in pieces within the limit, or of one sample; TaskError if they have another weight."""
        if self.limit is None or self._is_meant_whole(task):
            return [whole]
        pieces = _within(task, whole, self.limit)
        if len(pieces) > 1 and not task.late_weight:
            _check_weights(task, whole, pieces)
        return pieces

    def passes(self, tasks: Mapping[str, Task], work: tuple[Microbatch, ...]) -> Sequence[Microbatch]:
        """The micro-batches as they go through the model, one after the other."""
        if self.limit is None:
            return work
        return [part_of(one, piece) for one in work for piece in self.pieces(tasks[one.task], whole_of(one))]

    def finer(self, task: Task, piece: SubBatch) -> bool:
        """Remember that `piece` does not fit; False if it can't be cut."""
        if not self.can_be_cut(task, piece):
            return False
        # where the halves are as large as the whole (a tensor that both share), at least the halving is remembered
        largest = max(num_elements(part.data) for part in parts_of(task, piece))
        self.limit = min(largest, num_elements(piece.data) - 1, self.limit or largest)
        return True

    def can_be_cut(self, task: Task, piece: SubBatch) -> bool:
        return not self._is_meant_whole(task) and len(parts_of(task, piece)) > 1

    def _is_meant_whole(self, task: Task) -> bool:
        return not self.sums and not _splits_itself(task)


def parts_of(task: Task, piece: SubBatch) -> list[SubBatch]:
    """A piece in two, or as itself, where it can't be cut."""
    if _splits_itself(task):
        return _split_by_task(task, piece)
    if piece.cut_from is not None:
        batch, count, first, end = piece.cut_from
    else:
        count = cuttable_samples(piece.data, piece.num_samples, in_columns=piece.in_columns)
        batch, first, end = piece.data, 0, count
    if end - first < 2:
        return [piece]
    middle = first + half_of_samples(end - first)
    return [
        SubBatch(
            samples_of(batch, begin, stop, count),
            path=(*piece.path, number),
            num_samples=None if piece.num_samples is None else stop - begin,
            cut_from=(batch, count, begin, stop),
        )
        for number, (begin, stop) in enumerate([(first, middle), (middle, end)])
    ]


def part_of(microbatch: Microbatch, piece: SubBatch) -> Microbatch:
    """The micro-batch that holds a piece of another."""
    if not piece.path:
        return microbatch
    known = piece.num_samples
    return replace(microbatch, data=piece.data, num_samples=known or 0, counted=known is not None, samples=())


def whole_of(microbatch: Microbatch) -> SubBatch:
    """A micro-batch as the piece that is all of it."""
    return SubBatch(microbatch.data, num_samples=microbatch.known_samples, in_columns=microbatch.in_columns)


def _within(task: Task, piece: SubBatch, limit: int) -> list[SubBatch]:
    parts = [piece] if num_elements(piece.data) <= limit else parts_of(task, piece)
    if len(parts) < 2:
        return [piece]
    return [small for part in parts for small in _within(task, part, limit)]


def _split_by_task(task: Task, piece: SubBatch) -> list[SubBatch]:
    given = cast("object", task.split(piece.data))
    if not isinstance(given, list | tuple) or not given:
        raise TaskError(
            f"`{type(task).__name__}.split` must give a list of two batches, or of one that can't be cut, but gave "
            f"{said(given)}; return `[first, second]`.",
            field="split",
        )
    parts = list(cast("Sequence[Any]", given))
    counts: list[int | None] = [None] * len(parts)
    if piece.num_samples is not None:
        counts = samples_of_parts(parts, piece.data, piece.num_samples)
    return [SubBatch(part, (*piece.path, number), counts[number]) for number, part in enumerate(parts)]


def _check_weights(task: Task, whole: SubBatch, pieces: list[SubBatch]) -> None:
    wanted = weight_of(task, whole.data, "a micro-batch", whole.num_samples)
    weight = math.fsum(weight_of(task, one.data, "a part of a micro-batch", one.num_samples) for one in pieces)
    if not math.isclose(weight, wanted, rel_tol=1e-6):
        raise TaskError(
            f"a micro-batch of weight {wanted:g} had to be cut to fit into memory, but its {len(pieces)} parts weigh "
            f"{weight:g} together: override `{type(task).__name__}.split` to say how its batches are cut in two, or "
            f"lower the micro-batch size.",
            field="split",
        )


def _splits_itself(task: Task) -> bool:
    return getattr(task.split, "__func__", None) is not Task.split
