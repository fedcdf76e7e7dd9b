"""Global batch of the micro-batches that ranks give an engine, numbered over all ranks."""

from collections.abc import Sequence
from typing import Any

from evenstep.data import Batch, GlobalBatch, Microbatch, Part, Position
from evenstep.data.batch import named_batch
from evenstep.data.split import samples_in
from evenstep.errors import DataError
from evenstep.parallel import Group


def global_batch(given: Sequence[Any], position: Position, group: Group) -> GlobalBatch:
    """The global batch of the micro-batches that each rank of `group` gives; all ranks call it together.

    Args:
        given: this rank's micro-batches, or one `GlobalBatch`, which is taken as it is.

    >>> batch = global_batch((["a"], (["b", "c"], "box")), Position(batch=7), Group())
    >>> [(one.index, one.task) for one in batch.microbatches], batch.following
    ([(0, ''), (1, 'box')], Position(epoch=0, batch=8))
    """
    if len(given) == 1 and isinstance(given[0], GlobalBatch):
        return given[0]
    mine = [named_batch(one) for one in given]
    told = group.gather([(one.task, _num_samples(one.data)) for one in mine])
    first = sum(len(theirs) for theirs in told[: group.rank])
    everything = [one for theirs in told for one in theirs]
    return GlobalBatch(
        position=position,
        following=position.after(ends_epoch=False),
        microbatches=tuple(
            _microbatch(one, first + place, everything[first + place][1]) for place, one in enumerate(mine)
        ),
        num_microbatches=len(everything),
        num_samples=sum(samples for _, samples in everything),
        ends_epoch=False,
        # micro-batches of one task without a name are one batch, however many they are
        parts=tuple(Part(task=task, num_microbatches=1, num_samples=samples) for task, samples in everything)
        if any(task for task, _ in everything)
        else (),
    )


def _num_samples(data: object) -> int:
    try:
        return samples_in(data)
    except DataError:
        return 1


def _microbatch(batch: Batch, number: int, num_samples: int) -> Microbatch:
    return Microbatch(index=number, data=batch.data, num_samples=num_samples, task=batch.task, counted=False)
