"""Whether the ranks of a pipeline have read the same batch: the last one's labels belong to the inputs of the first.

It is asked in the first update. Later ones follow from what all ranks have in common, as the data order does.
"""

from evenstep.data import GlobalBatch
from evenstep.data.split import checksums
from evenstep.errors import ReplicaError
from evenstep.parallel import Group


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
