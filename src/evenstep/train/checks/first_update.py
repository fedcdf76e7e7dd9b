"""What is worth saying once, at the first update: nothing that is wrong, but seldom meant.

Parameters that get gradients but are in no optimizer, ranks that will never have work, global batches larger than the
data. It stops nothing.
"""

from collections.abc import Iterator, Sequence
from typing import final

from evenstep.data import Data, GlobalBatch
from evenstep.events import Incident


@final
class Remarks:
    """Says them once, of the first global batch that is no shorter than the others.

    Attributes:
        said: whether that is done.
    """

    def __init__(self) -> None:
        self.said = False

    def __call__(
        self, batch: GlobalBatch, *, data: Data, ranks: int, outside: Sequence[str], rank: int | None, update: int
    ) -> Iterator[Incident]:
        """The remarks as incidents.

        Args:
            batch: that is about to be trained on.
            outside: names of parameters that get a gradient though the optimizer does not hold them.
            rank: that holds those, where others hold others.
            update: number of the update.
        """
        is_all = batch.position.batch == 0 and batch.ends_epoch
        if batch.ends_epoch and not is_all:
            return  # the next one tells more
        self.said = True
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
        if is_all and isinstance(size, int) and batch.num_samples < size:
            yield Incident(
                kind="small_data",
                update=update,
                message=(
                    f"a global batch is {size} samples, but the data hold {batch.num_samples}, so each update is an "
                    f"epoch of those; make it at most {batch.num_samples}."
                ),
            )
