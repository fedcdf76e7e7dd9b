"""Cuts micro-batches that do not fit into a rank's memory; a size that did not fit is not tried again in the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

from evenstep.arguments import said
from evenstep.data import Microbatch
from evenstep.data.split import cuttable_samples, samples_of
from evenstep.data.tree import num_elements
from evenstep.errors import TaskError
from evenstep.train.tasks.task import Task, weight_of


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

    def pieces(self, task: Task, whole: Microbatch) -> list[Microbatch]:
        """A micro-batch in pieces within the limit, or of one sample; TaskError if they have another weight."""
        if self.limit is None or self._is_meant_whole(task):
            return [whole]
        pieces = _within(task, whole, self.limit)
        if len(pieces) > 1 and not task.late_weight:
            _check_weights(task, whole, pieces)
        return pieces

    def can_be_cut(self, task: Task, piece: Microbatch) -> bool:
        return not self._is_meant_whole(task) and len(parts_of(task, piece)) > 1

    def cut_finer(self, task: Task, piece: Microbatch) -> None:
        """Remember that `piece` does not fit."""
        # where the halves are as large as the whole (a tensor that both share), at least the halving is remembered
        largest = max(num_elements(part.data) for part in parts_of(task, piece))
        self.limit = min(largest, num_elements(piece.data) - 1, self.limit or largest)

    def _is_meant_whole(self, task: Task) -> bool:
        return not self.sums and not _splits_itself(task)


def parts_of(task: Task, piece: Microbatch) -> list[Microbatch]:
    """A micro-batch or a piece in two, or as itself, where it can't be cut."""
    if _splits_itself(task):
        return _split_by_task(task, piece)
    if piece.cut_from is not None:
        batch, count, first, end = piece.cut_from
    else:
        count = cuttable_samples(piece.data, piece.known_samples, in_columns=piece.in_columns)
        batch, first, end = piece.data, 0, count
    if end - first < 2:
        return [piece]
    middle = first + (end - first + 1) // 2
    return [
        replace(
            piece,
            data=samples_of(batch, begin, stop, count),
            num_samples=stop - begin,
            part=(*piece.part, number),
            cut_from=(batch, count, begin, stop),
        )
        for number, (begin, stop) in enumerate([(first, middle), (middle, end)])
    ]


def _within(task: Task, piece: Microbatch, limit: int) -> list[Microbatch]:
    parts = [piece] if num_elements(piece.data) <= limit else parts_of(task, piece)
    if len(parts) < 2:
        return [piece]
    return [small for part in parts for small in _within(task, part, limit)]


def _split_by_task(task: Task, piece: Microbatch) -> list[Microbatch]:
    given = cast("object", task.split(piece.data))
    if not isinstance(given, list | tuple) or not given:
        raise TaskError(
            f"`{type(task).__name__}.split` must give a list of two batches, or of one that can't be cut, but gave "
            f"{said(given)}; return `[first, second]`.",
            field="split",
        )
    return [
        replace(piece, data=data, num_samples=0, counted=False, part=(*piece.part, number))
        for number, data in enumerate(cast("Sequence[Any]", given))
    ]


def _check_weights(task: Task, whole: Microbatch, pieces: list[Microbatch]) -> None:
    wanted = weight_of(task, whole.data, "a micro-batch", whole.known_samples)
    weight = math.fsum(weight_of(task, one.data, "a part of a micro-batch", one.known_samples) for one in pieces)
    if not math.isclose(weight, wanted, rel_tol=1e-6):
        raise TaskError(
            f"a micro-batch of weight {wanted:g} had to be cut to fit into memory, but its {len(pieces)} parts weigh "
            f"{weight:g} together: override `{type(task).__name__}.split` to say how its batches are cut in two, or "
            f"lower the micro-batch size.",
            field="split",
        )


def _splits_itself(task: Task) -> bool:
    return getattr(task.split, "__func__", None) is not Task.split
