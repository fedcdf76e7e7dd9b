"""Whether the ranks of a pipeline have read the same batch: the last one's labels belong to the inputs of the first.

What is in it they compare in the first update: later batches follow from what all have in common, as the data order
does. In each update they compare how many samples there are and what these weigh: a rank may have left some out.
"""

from zlib import crc32

from evenstep.data import GlobalBatch
from evenstep.data.split import checksums
from evenstep.errors import ReplicaError
from evenstep.parallel import Group
from evenstep.train.update.weigh import Weights


def check_batches(pipeline: Group, batch: GlobalBatch) -> None:
    """Raise ReplicaError unless all ranks of a pipeline have read the same batch; they call it together.

    What only some of them have read is not compared.
    """
    first, *others = pipeline.gather({one.index: (one.task, checksums(one.data)) for one in batch.microbatches})
    for rank, theirs in enumerate(others, start=1):
        if theirs.keys() != first.keys():
            raise ReplicaError(
                f"the ranks of a pipeline must be given the same micro-batches, but rank 0 of one has the numbers "
                f"{[*first]} and rank {rank} {[*theirs]}; only pipelines, the replicas of a model, divide them."
            )
        for number, (task, bits) in first.items():
            their_task, their_bits = theirs[number]
            unlike = [path for path in bits if their_bits.get(path, bits[path]) != bits[path]]
            if task != their_task or unlike:
                named = f"`{unlike[0]}`" if unlike and unlike[0] else "tensors"
                what = f"task `{their_task}`, not `{task}`," if task != their_task else f"other {named}"
                raise ReplicaError(
                    f"all ranks of a pipeline must read the same batches, as the last one's labels belong to the "
                    f"first one's inputs, but rank {rank} of one has {what} in micro-batch {number} than rank 0. Give "
                    f"all ranks the same files in the same order; draw what a dataset draws when it is made under a "
                    f"fixed seed (`torch.manual_seed(0)`), and later from torch's, numpy's or Python's global "
                    f"generators, which are seeded for each sample."
                )


def check_weights(pipeline: Group, batch: GlobalBatch, weights: Weights) -> None:
    """Raise ReplicaError unless all ranks of a pipeline have as many samples of the same weight; all call it."""
    mine = [(one.index, one.known_samples, weights.each.get(one.index)) for one in batch.microbatches]
    stamp = float(crc32(repr(mine).encode()))
    if pipeline.sum_floats([stamp]) == [pipeline.sum_of_same(stamp)]:
        return
    told = "; ".join(
        f"rank {rank} has {samples} samples of the weight {weight:g}, and left {left} out"
        for rank, (samples, weight, left) in enumerate(pipeline.gather(_summed(batch, weights)))
    )
    raise ReplicaError(
        f"all ranks of a pipeline must have the same samples and weights in an update, but of this {told}. A sample "
        f"that only one rank can't read is not left out by the others: let it be read again, "
        f"`Reading(retries=…)`, and go on from the last checkpoint. Or `Task.weight` depends on the rank."
    )


def _summed(batch: GlobalBatch, weights: Weights) -> tuple[int, float, int]:
    left = sum(fault.num_skipped for fault in batch.faults)
    return sum(one.num_samples for one in batch.microbatches), sum(weights.each.values()), left
