"""The global batches of a run in the order in which they are taken, also when some are taken again or given up.

It reads `data` from a position on, one pass at a time. Batches of updates that were aborted come again before those
that follow; those that a rewind gives up are known, so that the loop can leave them out. It runs nothing.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast, final

from evenstep.data import Data, GlobalBatch, Position, ReadOptions
from evenstep.errors import DataError
from evenstep.parallel import Reducers

_REMEMBERED_UPDATES = 10_000


@final
@dataclass(slots=True, kw_only=True)
class Feed:
    """Gives the loop its global batches.

    Args:
        reducers: say which micro-batches are this rank's.
        seed: of the data's order and augmentation.
        pin_memory: whether batches are put in pinned memory.
        max_skipped_samples: how many samples that can't be read may be left out before the run stops.

    Attributes:
        ended: whether the data gave no more.
    """

    data: Data
    reducers: Reducers
    seed: int
    pin_memory: bool
    max_skipped_samples: int
    ended: bool = False
    _batches: Iterator[GlobalBatch] = field(default_factory=lambda: iter(()))
    _again: deque[GlobalBatch] = field(default_factory=deque[GlobalBatch])
    _given_up: list[tuple[Position, Position]] = field(default_factory=list[tuple[Position, Position]])
    _followings: deque[tuple[int, Position]] = field(
        default_factory=lambda: deque[tuple[int, Position]](maxlen=_REMEMBERED_UPDATES)
    )
    _skipped_samples: int = 0

    @contextmanager
    def opened(self, position: Position) -> Generator[None]:
        self._again.clear()
        self.ended = False
        self._batches = self.data.batches(
            ReadOptions(
                start=position,
                seed=self.seed,
                rank=self.reducers.data_group.rank,
                ranks=self.reducers.data_group.ranks,
                blocks=self.reducers.blocks,
                total=self.reducers.data_group.sum_floats,
                pin_memory=self.pin_memory,
            )
        )
        with closing(cast("Any", self._batches)):
            yield

    def take(self) -> GlobalBatch | None:
        """The next global batch; None at the end of the data."""
        return self._again.popleft() if self._again else next(self._batches, None)

    def peek(self) -> GlobalBatch | None:
        """The same, which comes again."""
        batch = self.take()
        if batch is not None:
            self.take_again([batch])
        return batch

    def take_again(self, batches: Sequence[GlobalBatch]) -> None:
        """Let `batches` come next, in their order."""
        self._again.extendleft(reversed(batches))

    def forget(self) -> None:
        """Take nothing again: a new pass begins."""
        self._again.clear()

    def used(self, update: int, batch: GlobalBatch) -> None:
        """Remember that `update` was tried with `batch`."""
        self._followings.append((update, batch.following))

    def end_of(self, update: int) -> Position | None:
        """The position after the batch that `update` was last tried with; None where that was too long ago."""
        return next((position for number, position in reversed(self._followings) if number == update), None)

    def give_up(self, begin: Position, end: Position) -> None:
        """Leave out the global batches from `begin` on that are before `end`."""
        self._given_up.append((begin, end))

    def is_given_up(self, batch: GlobalBatch) -> bool:
        return bool(self._given_up) and any(begin <= batch.position < end for begin, end in self._given_up)

    def count_skipped(self, samples: int) -> None:
        """Count samples that were left out; all ranks count the same.

        Raises:
            DataError: too many can't be read.
        """
        self._skipped_samples += samples
        if self._skipped_samples > self.max_skipped_samples:
            raise DataError(
                f"{self._skipped_samples} samples could not be read and were left out, more than the "
                f"{self.max_skipped_samples} of `max_skipped_samples`; the folder `incidents` of the run names them. "
                f"Correct the data, or raise `failures.max_skipped_samples`."
            )
