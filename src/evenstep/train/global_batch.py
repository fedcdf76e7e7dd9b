"""Makes a global batch of what each rank gives a loop of one's own: numbered over all ranks, the first rank's first.

What is one micro-batch is told by how it was given, never by its type: each argument is one. It looks at no numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evenstep.arguments import said
from evenstep.data import Batch, Data, GlobalBatch, Microbatch, Part, Position
from evenstep.data.batch import JSON
from evenstep.data.stream import samples_in
from evenstep.data.update_data import named_batch
from evenstep.errors import ArgumentError, DataError
from evenstep.names import parameters_in
from evenstep.parallel import Group


def global_batch(
    given: Sequence[Any], position: Position, group: Group, *, optimizer: Optimizer | None = None
) -> GlobalBatch:
    """The global batch of the micro-batches that each rank of `group` gives; all ranks call it together.

    Args:
        given: this rank's micro-batches, or one `GlobalBatch`, which is taken as it is.
        optimizer: of whose parameters no batch may be computed with a gradient.

    >>> batch = global_batch((["a"], (["b", "c"], "box")), Position(batch=7), Group())
    >>> [(one.index, one.task) for one in batch.microbatches], batch.following
    ([(0, ''), (1, 'box')], Position(epoch=0, batch=8))
    """
    if len(given) == 1 and isinstance(given[0], GlobalBatch):
        return given[0]
    mine = [named_batch(one) for one in given]
    source = next((one.data for one in mine if isinstance(one.data, Data | DataLoader)), None)
    if source is not None:
        raise ArgumentError(
            f"an engine takes batches, but was given {said(source)}, which gives them: `for batch in loader: "
            f"engine.update(batch)`; a `Trainer` takes data as a whole."
        )
    for one in mine:
        _check_given(one.data, optimizer)
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


def _check_given(data: object, optimizer: Optimizer | None) -> None:
    """Raise ArgumentError for a batch that the model has computed, such as its output or a loss."""
    parts: Any = data.values() if isinstance(data, Mapping) else data
    for one in parts if isinstance(data, tuple | list | Mapping) else (data,):
        if isinstance(one, Tensor) and one.requires_grad and optimizer is not None and _leads_to(one, optimizer):
            raise ArgumentError(
                f"an engine takes batches, but was given a tensor of shape {list(one.shape)} that the model has "
                f"computed, with its gradient: the engine calls the model by itself, with what the task's `inputs` "
                f"gives of the batch, and the task's `loss` is given the output. Write `engine.update((inputs, "
                f"targets))`; of an earlier forward, such as the probabilities that actions had, give `.detach()`."
            )


def _leads_to(computed: Tensor, optimizer: Optimizer) -> bool:
    """Whether a gradient of `computed` would come to one of the optimizer's parameters."""
    wanted, seen = set(map(id, parameters_in(optimizer))), set[Any]()
    nodes: list[Any] = [computed.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in wanted:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def _num_samples(data: object) -> int:
    """How many samples a batch seems to hold; only counters of samples depend on it."""
    try:
        return samples_in(data)
    except DataError:
        return 1


def _microbatch(batch: Batch, number: int, num_samples: int) -> Microbatch:
    return Microbatch(index=number, data=batch.data, num_samples=num_samples, task=batch.task, counted=False)


@final
class OneBatch(Data):
    """Data of one global batch."""

    def __init__(self, batch: GlobalBatch) -> None:
        self._batch = batch

    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        yield self._batch

    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        return 1

    def fingerprint(self) -> dict[str, JSON]:
        return {"kind": "one batch"}
