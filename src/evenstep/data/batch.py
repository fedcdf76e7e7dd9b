"""Positions, micro-batches, global batches, and the base class of data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

import numpy as np
from torch import Tensor

from evenstep.errors import DataError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Position(NamedTuple):
    """Place of a global batch: number `batch` of epoch `epoch`, both from 0. Earlier ones compare as smaller."""

    epoch: int = 0
    batch: int = 0

    def after(self, *, ends_epoch: bool) -> "Position":
        """Position of the next global batch."""
        return Position(self.epoch + 1, 0) if ends_epoch else Position(self.epoch, self.batch + 1)


_FIRST = Position()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading global batches in this process.

    Args:
        start: position of the first global batch.
        rank, ranks: data-parallel rank of this process, and their number.
        blocks: number B of blocks in which gradients are added; None without blocks.
        total: sums numbers over the ranks, which call it together; streams need it on several ranks.
        pin_memory: whether batches are put in pinned memory, where there is an accelerator.
    """

    seed: int
    start: Position = _FIRST
    rank: int = 0
    ranks: int = 1
    blocks: int | None = None
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    pin_memory: bool = False

    def share(self, num_microbatches: int) -> range:
        """Global numbers of the micro-batches that this rank runs.

        Rank r of R runs n·r // R up to n·(r+1) // R of n micro-batches. With B blocks, n > B and R ≤ B it runs whole
        blocks: B·r // R up to B·(r+1) // R, where block b holds micro-batches n·b // B up to n·(b+1) // B.

        >>> [ReadOptions(seed=1, rank=rank, ranks=2, blocks=3).share(8) for rank in range(2)]
        [range(0, 2), range(2, 8)]
        """
        rank, ranks, blocks = self.rank, self.ranks, self.blocks
        if blocks is None or num_microbatches <= blocks or ranks > blocks:
            return range(num_microbatches * rank // ranks, num_microbatches * (rank + 1) // ranks)
        first, end = blocks * rank // ranks, blocks * (rank + 1) // ranks
        return range(num_microbatches * first // blocks, num_microbatches * end // blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFault:
    """A fault while a batch was read that the run survives; `details` is the traceback, or ""."""

    message: str
    samples: Sequence[int] = ()
    num_skipped: int = 0
    details: str = ""


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """Samples that go through forward and backward at once.

    Args:
        index: number 0..n-1 in the global batch, counted over all ranks.
        samples: numbers of the samples in the dataset, if they have any.
        counted: whether `num_samples` is certain, and not taken from the shapes of a ready-made batch.
        in_columns: whether lists in `data` are columns, as torch's default collate function makes them.
        part: of a piece that was cut to fit into memory: (0,) is the first half, (0, 1) the second half of that.
        cut_from: the data that it was cut from, their number of samples, and the piece's first sample and end.
    """

    index: int
    data: object
    num_samples: int
    samples: Sequence[int] = ()
    task: str = ""
    counted: bool = True
    in_columns: bool = False
    part: tuple[int, ...] = ()
    cut_from: tuple[object, int, int, int] | None = None

    @property
    def known_samples(self) -> int | None:
        """Number of samples; None where it is not certain."""
        return self.num_samples if self.counted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One task's batch in a global batch of several; its micro-batches, over all ranks, have consecutive numbers."""

    task: str
    num_microbatches: int
    num_samples: int


@dataclass(slots=True, kw_only=True)
class GlobalBatch:
    """All samples of one update. This rank holds `microbatches`, in order; the numbers count all ranks.

    Args:
        following: position after this batch, at which a checkpoint taken now resumes.
        num_samples: samples that were left out included.
        parts: batches of several tasks, in the order of their micro-batches; none for one batch of one task.
    """

    position: Position
    following: Position
    microbatches: tuple[Microbatch, ...]
    num_microbatches: int
    num_samples: int
    faults: tuple[DataFault, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def ends_epoch(self) -> bool:
        return self.following.batch == 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of a named task."""

    task: str
    data: Any


def batches_in(item: object) -> list[Batch]:
    """The batches of one update: of a plain tuple several, except a pair (data, task name); of other objects one.

    >>> [(batch.task, batch.data) for batch in batches_in(([1], ([2], "box"), Batch(task="class", data=[3])))]
    [('', [1]), ('box', [2]), ('class', [3])]
    """
    if type(item) is not tuple or _is_pair(item):
        return [named_batch(item)]
    several = cast("tuple[object, ...]", item)
    is_bare = any(isinstance(one, Tensor | np.ndarray | np.generic | int | float | complex) for one in several)
    if not several or (is_bare and len(several) > 1):
        raise DataError(
            f"an update is a tuple of {len(several)}, but must be of batches, not of bare tensors or numbers; give "
            f'`(batch,)` for one batch that is a tuple, and `(Batch(task="", data=x), …)` for several tensors.',
            field="data",
        )
    return [named_batch(one) for one in several]


def named_batch(item: object) -> Batch:
    """A batch with its task's name: as given in a `Batch` or a pair (data, name), else ""."""
    if isinstance(item, Batch):
        return item
    if _is_pair(item):
        data, task = cast("tuple[object, str]", item)
        return Batch(task=task, data=data)
    return Batch(task="", data=item)


def _is_pair(item: object) -> bool:
    pair = cast("tuple[object, ...]", item)
    return type(item) is tuple and len(pair) == 2 and isinstance(pair[1], str)


class Data(ABC):
    """A source of global batches.

    Attributes:
        tasks: names of the tasks that it has batches for; ("",) without names, None where only reading tells.
        limit_batches: most global batches of an epoch; None for no limit.
        positions: places to resume at: "all", the "last" one given out, or the beginnings of "epochs".
        scope: "run": one state for all ranks, of any number; "rank": each rank has its own.
    """

    tasks: tuple[str, ...] | None = ("",)
    limit_batches: int | None = None

    @property
    def positions(self) -> Literal["all", "last", "epochs"]:
        return "all"

    @property
    def scope(self) -> Literal["run", "rank"]:
        return "run"

    @abstractmethod
    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        """Give this rank's part of the global batches from `read.start` on; DataError if the data can't."""

    @abstractmethod
    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        """Number of global batches of `epoch`; None where only reading tells."""

    @abstractmethod
    def fingerprint(self) -> dict[str, JSON]:
        """Everything that must be equal for a resumed run to be exact; `cut`, if there, must be on all ranks only."""

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        """State beside a position, by default after the last batch; DataError for a position that is not kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where `state_dict` was taken, where the next `batches` starts; DataError for a state of other data."""

    def close(self) -> None:
        """Stop whatever runs in the background; the data may be used again after."""
