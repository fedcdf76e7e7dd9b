"""Counts what an update's losses cover, before any forward.

With the total known, each micro-batch's summed loss is divided at once and every later reduction is a plain SUM:
g = Σ∇S_m / Σw_m. It does not look at outputs; a late weight is counted by the forward itself.
"""

import math
from dataclasses import dataclass
from typing import final

from evenstep.data import GlobalBatch, Microbatch
from evenstep.errors import TaskError
from evenstep.parallel import Group
from evenstep.train.task import Task


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one update.

    Args:
        total: Σw_m over all micro-batches and ranks; 1.0 while the task's weights are late.
        num_microbatches: of the update, over all ranks.
        each: w_m of this rank's micro-batches, by their global number; empty while late.
        work: this rank's micro-batches that have a weight above 0, or a late one.
        skipped_samples: how many samples all ranks had to leave out because they could not be read.
    """

    total: float
    num_microbatches: int
    each: dict[int, float]
    work: tuple[Microbatch, ...]
    skipped_samples: int


def weigh(task: Task, batch: GlobalBatch, group: Group) -> Weights:
    """Count the weights of one update.

    All ranks sum the same weights in the same order (exactly rounded, even), so all get the same total.

    Raises:
        TaskError: a weight is negative, not finite, or not a number.
    """
    count = batch.num_microbatches
    skipped = float(sum(fault.num_skipped for fault in batch.faults))
    if task.late_weight:
        (skipped,) = group.sum_floats([skipped])
        return Weights(
            total=1.0, num_microbatches=count, each={}, work=batch.microbatches, skipped_samples=int(skipped)
        )
    each = {
        microbatch.index: weight_of(task, microbatch.data, f"micro-batch {microbatch.index}")
        for microbatch in batch.microbatches
    }
    work = tuple(microbatch for microbatch in batch.microbatches if each[microbatch.index] > 0)
    *weights, skipped = group.sum_floats([*(each.get(index, 0.0) for index in range(count)), skipped])
    return Weights(total=math.fsum(weights), num_microbatches=count, each=each, work=work, skipped_samples=int(skipped))


def weight_of(task: Task, data: object, what: str) -> float:
    """The weight that `task` gives a batch, which messages call `what`.

    Raises:
        TaskError: it is negative, not finite, or not a number.
    """
    given = task.weight(data)
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a number or a 0-dim tensor, but gave {type(given).__name__} for "
            f"{what}: {error}"
        ) from error
    if not 0 <= weight < math.inf:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a finite number of at least 0, but gave {weight} for "
            f"{what}; it is the number of units that the summed loss covers."
        )
    return weight
