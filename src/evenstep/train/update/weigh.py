"""Counts what an update's losses cover, before any forward.

With the totals known, each micro-batch's summed loss is divided at once and every later reduction is a plain SUM:
g = Σ_t λ_t · Σ_{m∈t} ∇S_m / Σ_{m∈t} w_m. It does not look at outputs; a late weight is counted by the forward itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final
from zlib import crc32

from evenstep.arguments import advice
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
        dealing: the ranks that run the update's micro-batches, and their blocks.
        numbers: the global numbers of each task's micro-batches.
        each: w_m of this rank's micro-batches, by their global number, without late ones.
        divisors: of the summed losses of each task before the backward: the total, or 1 if it is late.
        work: this rank's micro-batches that have a weight above 0, or a late one.
        num_tasks: number of tasks with work in the update.
        skipped_samples: number of unreadable samples that all ranks have left out.
    """

    totals: Mapping[str, float]
    dealing: Dealing
    each: dict[int, float]
    divisors: Mapping[str, float]
    work: tuple[Microbatch, ...]
    num_tasks: int
    skipped_samples: int = 0
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the update, over all ranks."""
        return len(self.dealing.owners)

    @property
    def total(self) -> float:
        """Σw_m over all tasks; 0 where nobody has work."""
        return math.fsum(self.totals.values())

    @classmethod
    def of_forwards(
        cls, task: str, work: tuple[Microbatch, ...], *, num_microbatches: int, weight: float = 1.0
    ) -> Self:
        """Weights of micro-batches of one task that train nothing."""
        totals = {task: 1.0}
        return cls(
            totals=totals,
            dealing=Dealing.of_one(num_microbatches),
            each={one.index: weight for one in work},
            divisors=totals,
            work=work,
            num_tasks=1,
        )

    def of(self, *tasks: str) -> Self:
        work = tuple(microbatch for microbatch in self.work if microbatch.task in tasks)
        dealing = self.dealing.of(number for task in tasks for number in self.numbers[task])
        return replace(self, totals={task: self.totals[task] for task in tasks}, work=work, dealing=dealing)


def weigh(
    tasks: Mapping[str, Task], batch: GlobalBatch, group: Group, *, blocks: int | None = None, stamp: float = 1.0
) -> Weights:
    """Count the weights of one update: all ranks sum them in the same order, exactly rounded.

    Args:
        blocks: number of blocks in which the gradients of each task's micro-batches are added; None: one for each.
        stamp: of what this rank trains, above 0, which must be the same on all.
    """
    each: dict[int, float] = {}
    work: list[Microbatch] = []
    count = batch.num_microbatches
    # weights, the numbers of the ranks from 1 on, the samples that had to be left out, and the stamp
    mine = [0.0] * (2 * count + 2)
    mine[-1] = stamp
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
    for fault in batch.faults:
        mine[-2] += fault.num_skipped
    everybody = group.sum_floats(mine)
    if everybody[-1] != group.sum_of_same(stamp):
        raise ReplicaError(
            f"rank {group.rank} is about to train other parameters, or at another learning rate, than another rank: "
            f"`requires_grad` or the optimizer's `lr` was changed on some ranks only. Change it on all of them at the "
            f"same update; a hook that is `first_rank_only` runs on one."
        )
    numbers = _numbers(batch)
    totals = {name: math.fsum(everybody[number] for number in theirs) for name, theirs in numbers.items()}
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
        dealing=Dealing(tuple(int(owner) - 1 for owner in everybody[count : 2 * count]), _blocks(batch, blocks)),
        each=each,
        divisors={name: 1.0 if name in late else total for name, total in totals.items()},
        work=tuple(work),
        num_tasks=len(totals),
        skipped_samples=int(everybody[-2]),
        numbers=numbers,
    )


def _blocks(batch: GlobalBatch, blocks: int | None) -> tuple[int, ...]:
    of_all: list[int] = []
    for num_microbatches in [part.num_microbatches for part in batch.parts] or [batch.num_microbatches]:
        first = of_all[-1] + 1 if of_all else 0
        of_all += [first + block for block in blocks_of(num_microbatches, blocks or num_microbatches)]
    return tuple(of_all)


def _numbers(batch: GlobalBatch) -> dict[str, Sequence[int]]:
    if not batch.parts:
        return {"": range(batch.num_microbatches)}
    numbers: dict[str, list[int]] = {}
    first = 0
    for part in batch.parts:
        last = first + part.num_microbatches
        numbers.setdefault(part.task, []).extend(range(first, last))
        first = last
    return dict(numbers)


def task_of(tasks: Mapping[str, Task], microbatch: Microbatch) -> Task:
    """The task that a micro-batch is for."""
    task = tasks.get(microbatch.task)
    if task is not None:
        return task
    names = ", ".join(f"`{name}`" for name in tasks)
    if not microbatch.task:
        raise TaskError(
            f"micro-batch {microbatch.index} does not say which task it is for, but the run has {names}; give it as "
            f"(data, task name) or Batch(task=…, data=…), or the data of each task in a `Mixture`."
        )
    has = "one task without a name" if "" in tasks else names
    meant = advice(microbatch.task, tasks, "name the tasks when you build the trainer.")
    raise TaskError(f"micro-batch {microbatch.index} is for task `{microbatch.task}`, but the run has {has}; {meant}")


def check_batches(pipeline: Group, batch: GlobalBatch) -> None:
    """Raise ReplicaError unless ranks of a pipeline have equal batches; all call it together."""
    mine = {(one.index, path): bits for one in batch.microbatches for path, bits in checksums(one.data).items()}
    first, *others = pipeline.gather(mine)
    for rank, theirs in enumerate(others, start=1):
        unlike = [index for (index, path), bits in theirs.items() if first.get((index, path), bits) != bits]
        if unlike:
            raise ReplicaError(
                f"all ranks of a pipeline must read the same batches, but rank {rank} of one has another micro-batch "
                f"{unlike[0]} than rank 0. Give all ranks the same files in the same order, and fix the seeds that "
                f"datasets draw from.",
                field="data",
            )


def check_pipeline_weights(pipeline: Group, batch: GlobalBatch, weights: Weights) -> None:
    """Raise ReplicaError unless ranks of a pipeline have the same samples and weights; all call it together."""
    mine = [(one.index, one.task, one.known_samples, weights.each.get(one.index)) for one in batch.microbatches]
    stamp = float(crc32(repr(mine).encode()))
    if pipeline.sum_floats([stamp]) != [pipeline.sum_of_same(stamp)]:
        raise ReplicaError(
            "the ranks of a pipeline have different samples or weights in an update: `Task.weight` must not depend on "
            "the rank, and an unreadable sample must be read again (`Reading(retries=…)`).",
            field="weight",
        )
