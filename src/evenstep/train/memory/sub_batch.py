"""A micro-batch, or a part of one, as it goes through the model at once; and how a task's batch is cut in two.

A task may say by itself how its batches are cut (`Task.split`); else samples are cut where the batch shows what they
are. It decides neither how finely nor when.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

from evenstep.arguments import said
from evenstep.data import Microbatch
from evenstep.data.split import cuttable_samples, half_of_samples, num_samples, samples_of, samples_of_parts, why_whole
from evenstep.errors import TaskError
from evenstep.train.tasks.task import Task


@final
@dataclass(slots=True)  # not frozen: one is made for every micro-batch, and freezing costs
class SubBatch:
    """What goes through the model at once.

    Args:
        data: a micro-batch, or a part of one.
        path: which part: () is the whole, (0,) its first half, (0, 1) the second half of that.
        num_samples: that it holds, where that is known.
        of: what it was cut from by the engine: the batch, in how many samples, the first of this piece, and the end.
            What is a list of samples is surer of the whole than of a few of them.
        in_columns: of the micro-batch.
    """

    data: Any
    path: tuple[int, ...] = ()
    num_samples: int | None = None
    of: tuple[Any, int, int, int] | None = None
    in_columns: bool = False


def parts_of(task: Task, piece: SubBatch) -> list[SubBatch]:
    """A piece in two, or as itself, where it can't be cut."""
    if splits_itself(task):
        whole, parts = piece.num_samples, cast("object", task.split(piece.data))
        if not isinstance(parts, list | tuple) or not parts:
            raise TaskError(
                f"`{type(task).__name__}.split` must give a list of two batches, or of one that can't be cut, but gave "
                f"{said(parts)}; return `[first, second]`."
            )
        parts = list(cast("Sequence[Any]", parts))
        told = [None] * len(parts) if whole is None else samples_of_parts(parts, piece.data, whole)
        return [SubBatch(part, (*piece.path, number), told[number]) for number, part in enumerate(parts)]
    of = piece.of
    if of is None:
        count = cuttable_samples(piece.data, piece.num_samples, in_columns=piece.in_columns)
        of = piece.data, count, 0, count
    batch, count, first, end = of
    if end - first < 2:
        return [piece]
    middle, parts = first + half_of_samples(end - first), list[SubBatch]()
    for number, (begin, stop) in enumerate(((first, middle), (middle, end))):
        data, size = samples_of(batch, begin, stop, count), stop - begin
        known = None if piece.num_samples is None else size
        parts.append(SubBatch(data, (*piece.path, number), known, (batch, count, begin, stop)))
    return parts


def splits_itself(task: Task) -> bool:
    return getattr(task.split, "__func__", None) is not Task.split


def reason_not_cut(task: Task, piece: SubBatch) -> str:
    if splits_itself(task) or piece.of is not None:
        return ""
    return why_whole(piece.data, piece.num_samples, in_columns=piece.in_columns)


def part_of(microbatch: Microbatch, piece: SubBatch) -> Microbatch:
    if not piece.path:
        return microbatch
    known = piece.num_samples
    return replace(microbatch, data=piece.data, num_samples=known or 0, counted=known is not None, samples=())


def whole_of(microbatch: Microbatch) -> SubBatch:
    """A micro-batch as the piece that is all of it."""
    return SubBatch(microbatch.data, num_samples=microbatch.known_samples, in_columns=microbatch.in_columns)


def described(piece: SubBatch) -> str:
    """A piece in words."""
    count = num_samples(piece.data, piece.num_samples)
    return "a micro-batch" if count is None else f"{count} sample{'' if count == 1 else 's'}"
