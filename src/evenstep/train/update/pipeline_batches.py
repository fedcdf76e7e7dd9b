"""Checks that the ranks of a pipeline have read the same batch."""

from zlib import crc32

from evenstep.data import GlobalBatch
from evenstep.data.tree import checksums
from evenstep.errors import ReplicaError
from evenstep.parallel import Group
from evenstep.train.update.weigh import Weights


def check_batches(pipeline: Group, batch: GlobalBatch) -> None:
    """Raise ReplicaError unless all ranks of a pipeline have read the same batch; they call it together."""
    first, *others = pipeline.gather({one.index: (one.task, checksums(one.data)) for one in batch.microbatches})
    for rank, theirs in enumerate(others, start=1):
        unlike = [number for number in {**first, **theirs} if not _same(first.get(number), theirs.get(number))]
        if unlike:
            raise ReplicaError(
                f"all ranks of a pipeline must read the same batches, but rank {rank} of one has another micro-batch "
                f"{unlike[0]} than rank 0. Give all ranks the same files in the same order, and fix the seeds that "
                f"datasets draw from.",
                field="data",
            )


def _same(one: tuple[str, dict[str, int]] | None, other: tuple[str, dict[str, int]] | None) -> bool:
    if one is None or other is None:
        return one is other
    (task, bits), (other_task, other_bits) = one, other
    return task == other_task and all(other_bits.get(path, bits[path]) == bits[path] for path in bits)


def check_weights(pipeline: Group, batch: GlobalBatch, weights: Weights) -> None:
    """Raise ReplicaError unless all ranks of a pipeline have as many samples of the same weight; all call it."""
    mine = [(one.index, one.known_samples, weights.each.get(one.index)) for one in batch.microbatches]
    stamp = float(crc32(repr(mine).encode()))
    if pipeline.sum_floats([stamp]) != [pipeline.sum_of_same(stamp)]:
        raise ReplicaError(
            "the ranks of a pipeline have other samples or weights in an update: `Task.weight` must not depend on the "
            "rank, and a sample that one rank can't read must be read again, `Reading(retries=…)`.",
            field="weight",
        )
