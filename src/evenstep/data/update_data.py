"""Global batches that are ready made: each item of an iterable is one update, for whoever brings their own loop.

What an item holds is told by its type alone, never by guessing at its contents. It mixes nothing and cuts nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch

from evenstep.data.batch import JSON, Microbatch, Part, Position
from evenstep.data.batching import share
from evenstep.data.dataset import fingerprint_of
from evenstep.data.iterated_data import Cut, IteratedData, RankReading
from evenstep.data.split import samples_in
from evenstep.data.stream import check_stream
from evenstep.data.stream_ranks import StreamRanks, Total
from evenstep.errors import DataError

_BY_LOOKS = samples_in


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of a named task; it is never taken for several.

    >>> Batch(task="box", data=[1, 2]).task
    'box'
    """

    task: str
    data: Any


def batches_in(item: object) -> list[Batch]:
    """The batches of one update.

    A plain tuple is several batches, except a pair (data, task name), which is one; it must not hold bare tensors. A
    list, a dict, a named tuple, a `Batch` and any other object is one. A batch without a task's name is of the task "".

    Raises:
        DataError: a tuple without a batch, or with bare tensors or numbers, which may be one batch or several.

    >>> [(batch.task, batch.data) for batch in batches_in(([1], ([2], "box"), Batch(task="class", data=[3])))]
    [('', [1]), ('box', [2]), ('class', [3])]
    """
    if type(item) is not tuple or _is_pair(cast("tuple[object, ...]", item)):
        return [named_batch(item)]
    several = cast("tuple[object, ...]", item)
    if not several:
        raise DataError("an update was given as an empty tuple, but must hold one batch at least.")
    bare = next((one for one in several if _is_bare(one)), None)
    if bare is not None and len(several) > 1:
        raise DataError(
            f"an update was given as a tuple of {len(several)} with a bare {type(bare).__name__} in it, which may be "
            f"one batch of {len(several)} parts or {len(several)} batches: give `(batch,)` for one batch that is a "
            f'tuple, and `(Batch(task="", data=x), …)` for several that are tensors.'
        )
    return [named_batch(one) for one in several]


def _is_bare(one: object) -> bool:
    return isinstance(one, torch.Tensor | np.ndarray | np.generic | int | float | complex)


def _is_pair(item: tuple[object, ...]) -> bool:
    return len(item) == 2 and isinstance(item[1], str)


def named_batch(item: object) -> Batch:
    """One batch with its task's name: of a `Batch` and a pair (data, task name) theirs, of anything else ""."""
    if isinstance(item, Batch):
        return item
    if type(item) is tuple and _is_pair(cast("tuple[object, ...]", item)):
        data, task = cast("tuple[object, str]", item)
        return Batch(task=task, data=data)
    return Batch(task="", data=item)


@final
class UpdateData(IteratedData):
    """The updates of an iterable: a tuple of batches, or one batch; see `batches_in`.

    On several ranks all iterate over the same updates, and each runs its share of an update's batches.

    Args:
        stream: gives one update after the other; iterating it again is the next epoch. To be resumable it needs
            `state_dict` and `load_state_dict`.
        samples_in: the number of samples of a batch; by default the first dimension of its first part.

    Raises:
        ArgumentError: it cannot be iterated.

    >>> data = UpdateData([((["a"], "class"), (["b", "c"], "box"))], samples_in=len)
    >>> batch = next(data.batches(Position(), seed=1))
    >>> [(one.index, one.task, one.data) for one in batch.microbatches], batch.num_samples
    ([(0, 'class', ['a']), (1, 'box', ['b', 'c'])], 3)
    """

    def __init__(self, stream: Iterable[Any], *, samples_in: Callable[[Any], int] = samples_in) -> None:
        check_stream(stream, gives_batches=True)
        super().__init__(stream)
        self._samples_in = samples_in

    @property
    def tasks(self) -> None:
        return None

    def fingerprint(self) -> dict[str, JSON]:
        batches: dict[str, JSON] = {"kind": "stream", "global_batch_size": None, "batched": True, "num_microbatches": 1}
        return {"kind": "updates", "stream": {**batches, "stream": fingerprint_of(self._stream)}}

    def _reading(self, rank: int, ranks: int, total: Total | None) -> RankReading:
        return RankReading(0, rank, ranks, 1, StreamRanks(total, ranks, shared=True))

    def _cut(self, items: list[object], reading: RankReading, position: Position) -> Cut:
        batches = batches_in(items[0])
        counts = [self._samples_in(batch.data) for batch in batches]
        return Cut(
            microbatches=tuple(
                Microbatch(
                    index=index,
                    data=batches[index].data,
                    num_samples=counts[index],
                    task=batches[index].task,
                    counted=self._samples_in is not _BY_LOOKS,
                )
                for index in share(len(batches), rank=reading.rank, ranks=reading.ranks)
            ),
            num_samples=sum(counts),
            num_microbatches=len(batches),
            parts=tuple(
                Part(task=batch.task, num_microbatches=1, num_samples=count)
                for batch, count in zip(batches, counts, strict=True)
            ),
        )
