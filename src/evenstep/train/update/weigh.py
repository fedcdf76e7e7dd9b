"""Counts what an update's losses cover, before any forward; a late weight is counted by the forward itself.

With the totals known, each summed loss is divided at once: g = Σ_t λ_t · Σ_{m∈t} ∇S_m / Σ_{m∈t} w_m.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self, final
from zlib import crc32

from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.tree import checksums
from evenstep.errors import ReplicaError, TaskError
from evenstep.parallel import Dealing, Group
from evenstep.parallel.blocks import blocks_of
from evenstep.train.tasks.task import Task, weight_of


@final
@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every update, and freezing costs
class Weights:
    """The weights of one update.

    Args:
        totals: Σw_m of each task that has work, over all ranks; the number of its micro-batches where it is late.
        divisors: of the summed losses of each task before the backward: the total, or 1 if it is late.
        each: w_m of this rank's micro-batches, by their global number, without late ones.
        work: this rank's micro-batches that have a weight above 0, or a late one.
        dealing: the ranks that run the update's micro-batches, and their blocks.
        numbers: the global numbers of each task's micro-batches.
        num_tasks: number of tasks with work in the update.
        skipped_samples: number of unreadable samples that all ranks have left out.
        has_unseen_buffers: a buffer has changed on some rank that others do not share yet.
    """

    totals: Mapping[str, float]
    divisors: Mapping[str, float]
    each: dict[int, float]
    work: tuple[Microbatch, ...]
    dealing: Dealing
    numbers: Mapping[str, Sequence[int]]
    num_tasks: int
    skipped_samples: int
    has_unseen_buffers: bool

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the update, over all ranks."""
        return len(self.dealing.owners)

    @property
    def total(self) -> float:
        """Σw_m over all tasks; 0 where nobody has work."""
        return math.fsum(self.totals.values())

    def of(self, task: str) -> Self:
        """The weights of one of several tasks."""
        if self.num_tasks == 1:
            return self
        work = tuple(microbatch for microbatch in self.work if microbatch.task == task)
        return replace(self, totals={task: self.totals[task]}, work=work, dealing=self.dealing.of(self.numbers[task]))


def weigh(
    tasks: Mapping[str, Task],
    batch: GlobalBatch,
    group: Group,
    *,
    blocks: int | None = None,
    stamp: float = 1.0,
    has_unseen_buffers: bool = False,
) -> Weights:
    """Count the weights of one update: all ranks sum them in the same order, exactly rounded.

    Args:
        blocks: number of blocks in which the gradients of each task's micro-batches are added; None: one for each.
        stamp: of what this rank trains, above 0, which must be the same on all.
        has_unseen_buffers: a buffer has changed on this rank that others do not share yet.
    """
    each: dict[int, float] = {}
    work: list[Microbatch] = []
    count = batch.num_microbatches
    # weights, the numbers of the ranks from 1 on, buffers to share, the samples that had to be left out, and the stamp
    mine = [0.0] * (2 * count + 3)
    mine[-1] = stamp
    mine[-3] = float(has_unseen_buffers)
    mine[-2] = float(sum([fault.num_skipped for fault in batch.faults]))
    for microbatch in batch.microbatches:
        weight, number = 1.0, microbatch.index
        task = tasks.get(microbatch.task) or task_of(tasks, microbatch)
        if not task.late_weight:
            weight = weight_of(task, microbatch.data, number, microbatch.known_samples)
            each[number] = weight
        if weight > 0:
            mine[number] = weight
            mine[count + number] = group.rank + 1.0
            work.append(microbatch)
    everybody = group.sum_floats(mine)
    if everybody[-1] != group.sum_of_same(stamp):
        raise ReplicaError(
            f"rank {group.rank} is about to train other parameters, or at another learning rate, than another rank: "
            f"`requires_grad` or the optimizer's `lr` was changed on some ranks only. Change it on all of them at the "
            f"same update; a hook that is `first_rank_only` runs on one."
        )
    parts = tuple([(part.task, part.num_microbatches) for part in batch.parts]) or (("", count),)
    numbers, in_blocks = _numbered(parts, blocks)
    totals = {name: math.fsum([everybody[number] for number in theirs]) for name, theirs in numbers.items()}
    totals = {name: total for name, total in totals.items() if total > 0}
    late = [name for name in totals if tasks[name].late_weight]
    if len(late) > 1:
        raise TaskError(
            f"tasks `{late[0]}` and `{late[1]}` both have a late weight, but only one task of an update may have one: "
            f"count the units of the other in `weight`.",
            field=late[1],
        )
    return Weights(
        totals=totals,
        divisors={name: 1.0 if name in late else total for name, total in totals.items()},
        each=each,
        work=tuple(work),
        dealing=Dealing(tuple([int(owner) - 1 for owner in everybody[count : 2 * count]]), in_blocks),
        numbers=numbers,
        num_tasks=len(totals),
        skipped_samples=int(everybody[-2]),
        has_unseen_buffers=everybody[-3] > 0,
    )


@lru_cache(maxsize=256)
def _numbered(
    parts: tuple[tuple[str, int], ...], blocks: int | None
) -> tuple[Mapping[str, Sequence[int]], tuple[int, ...]]:
    """Numbers of each task's micro-batches, and the block of each micro-batch; parts of a batch share none."""
    numbers: dict[str, list[int]] = {}
    of_all: list[int] = []
    for task, count in parts:
        first_block = of_all[-1] + 1 if of_all else 0
        numbers.setdefault(task, []).extend(range(len(of_all), len(of_all) + count))
        of_all += [first_block + block for block in blocks_of(count, blocks or count)]
    return numbers, tuple(of_all)


def task_of(tasks: Mapping[str, Task], microbatch: Microbatch) -> Task:
    """The task that a micro-batch is for."""
    task = tasks.get(microbatch.task)
    if task is None:
        has = ", ".join(f"`{name}`" for name in tasks if name) or "one task without a name"
        given = f"is for task `{microbatch.task}`" if microbatch.task else "does not say which task it is for"
        raise TaskError(
            f"micro-batch {microbatch.index} {given}, but the run has {has}; give it as (data, task name) or "
            f"Batch(task=…, data=…), or the data of each task in a `Mixture`."
        )
    return task


def check_pipeline(pipeline: Group, batch: GlobalBatch, weights: Weights, *, with_data: bool) -> None:
    """Raise ReplicaError unless ranks of a pipeline have the same samples and weights; all call it together."""
    mine = [
        (one.index, one.task, one.known_samples, weights.each.get(one.index), with_data and checksums(one.data))
        for one in batch.microbatches
    ]
    stamp = float(crc32(repr(mine).encode()))
    if pipeline.sum_floats([stamp]) != [pipeline.sum_of_same(stamp)]:
        raise ReplicaError(
            "the ranks of a pipeline read different samples, or weigh them differently. Give all of them the same "
            "files in the same order, fix the seeds that datasets draw from, let `Task.weight` not depend on the rank, "
            "and read unreadable samples again (`Reading(retries=…)`).",
            field="data",
        )
