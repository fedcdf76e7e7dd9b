"""What is worth saying once, at the first update: nothing that is wrong, but seldom meant.

Parameters that get gradients but are in no optimizer, tasks without data, ranks that will never have work, global
batches larger than the data. It stops nothing, and keeps nothing: that it is said once is the loop's to see to.
"""

from collections.abc import Iterator, Sequence

from evenstep.data import Data, GlobalBatch
from evenstep.events import Incident


def tells_of_others(batch: GlobalBatch) -> bool:
    """Whether a global batch is as most others are: the last of an epoch may be shorter, unless it is all of it."""
    return batch.position.batch == 0 or not batch.ends_epoch


def remarks(
    batch: GlobalBatch,
    *,
    data: Data,
    ranks: int,
    outside: Sequence[str],
    holding: Sequence[str],
    rank: int | None,
    update: int,
    without_data: Sequence[str] = (),
) -> Iterator[Incident]:
    """The remarks as incidents.

    Args:
        batch: that is about to be trained on, and `tells_of_others`.
        outside: names of parameters that get a gradient though the optimizer does not hold them.
        rank: that holds those, where others hold others.
        holding: the names under which tasks hold a model of which this rank has only some stages.
        without_data: names of tasks of which neither `data` nor an evaluation has a batch.
    """
    if without_data:
        yield _without_data(without_data[0], update)
    if holding:
        yield _holding_stages(holding[0], update)
    if outside:
        yield Incident(
            kind="not_in_optimizer",
            update=update,
            message=(
                f"{len(outside)} parameters get gradients but are not in the optimizer, first `{outside[0]}`, so "
                f"they stay as they are, and count in no norm; give them to the optimizer, or save their backward "
                f"with `requires_grad_(False)`."
            ),
            rank=rank,
            tensors=tuple(outside[:20]),
        )
    if batch.num_microbatches < ranks:
        each = batch.num_samples // ranks
        advice = data.to_cut_finer(each) if each else f"make a global batch at least {ranks} samples"
        yield Incident(
            kind="idle_ranks",
            update=update,
            message=(
                f"{ranks - batch.num_microbatches} of {ranks} ranks have nothing to do: a global batch of "
                f"{batch.num_samples} samples is {batch.num_microbatches} micro-batches; {advice}, or use fewer "
                f"ranks."
            ),
        )
    size = data.fingerprint().get("global_batch_size")
    if batch.ends_epoch and isinstance(size, int) and batch.num_samples < size:
        yield Incident(
            kind="small_data",
            update=update,
            message=(
                f"a global batch is {size} samples, but the data hold {batch.num_samples}, so each update is an "
                f"epoch of those; make it at most {batch.num_samples}."
            ),
        )


def _without_data(name: str, update: int) -> Incident:
    """The remark on a task of which there is no batch."""
    return Incident(
        kind="task_without_data",
        update=update,
        message=(
            f"task `{name}` is given but never trained or evaluated: neither `data` nor `evaluations` have batches of "
            f"it; add them, `Mixture({{'{name}': …}})`, or leave the task out."
        ),
    )


def _holding_stages(name: str, update: int) -> Incident:
    """The remark on a task that holds a model of which this rank has only some stages."""
    return Incident(
        kind="holds_stages",
        update=update,
        message=(
            f"`{name}` is a model in stages, of which this rank holds some: what a loss makes of its parameters leaves "
            f"out those of other ranks. Let layers give such a term beside their output, each of its own parameters, "
            f"or use the optimizer's `weight_decay`."
        ),
    )
