"""The global batches of a run, also those that are taken again or given up."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast, final

from evenstep.data import Data, GlobalBatch, Position, ReadOptions
from evenstep.errors import DataError
from evenstep.parallel import Reducers
from evenstep.train.requests import BrokenOff, Requests
from evenstep.train.timing import Phases

_REMEMBERED_UPDATES = 10_000
_NOWHERE: Iterator[GlobalBatch] = iter(())


@final
@dataclass(slots=True, kw_only=True)
class Feed:
    """Iterator over global batches.

    Args:
        reducers: say which micro-batches are this rank's.
        max_skipped_samples: unreadable samples that may be left out before the run stops.
        requests: a signal breaks off waiting for a batch.
    """

    data: Data
    reducers: Reducers
    seed: int
    pin_memory: bool
    max_skipped_samples: int
    phases: Phases
    requests: Requests
    _batches: Iterator[GlobalBatch] = _NOWHERE
    _again: deque[GlobalBatch] = field(default_factory=deque[GlobalBatch])
    _is_read: bool = False
    _given_up: list[tuple[Position, Position]] = field(default_factory=list[tuple[Position, Position]])
    _followings: deque[tuple[int, Position]] = field(
        default_factory=lambda: deque[tuple[int, Position]](maxlen=_REMEMBERED_UPDATES)
    )
    _skipped_samples: int = 0

    @property
    def ended(self) -> bool:
        """True if the data have no more."""
        return self._is_read and not self._again

    @contextmanager
    def opened(self, position: Position) -> Generator[Self]:
        self._again.clear()
        self._is_read = False
        group = self.reducers.data_group
        options = ReadOptions(
            start=position,
            seed=self.seed,
            rank=group.rank,
            ranks=group.ranks,
            blocks=self.reducers.blocks,
            total=group.sum_floats,
            pin_memory=self.pin_memory,
        )
        batches = self.data.batches(options)
        with closing(cast("Any", batches)):
            self._batches = self.requests.reading(batches, group)
            yield self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GlobalBatch:
        self.phases.lap("loop")
        try:
            return self._again.popleft() if self._again else next(self._batches)
        except StopIteration:
            self._is_read = True
            raise
        except BrokenOff:
            raise StopIteration from None  # the loop ends for the stop that was requested
        finally:
            self.phases.lap("data")

    def take_again(self, batches: Sequence[GlobalBatch]) -> None:
        self._again.extendleft(reversed(batches))

    def used(self, update: int, batch: GlobalBatch) -> None:
        """Remember that `update` was tried with `batch`."""
        self._followings.append((update, batch.following))

    def end_of(self, update: int) -> Position | None:
        """Position after the batch that `update` was last tried with; None where that was too long ago."""
        return next((position for number, position in reversed(self._followings) if number == update), None)

    def give_up(self, begin: Position, end: Position) -> None:
        """Leave out the global batches from `begin` on that are before `end`."""
        self._given_up.append((begin, end))

    def is_given_up(self, batch: GlobalBatch) -> bool:
        return any(begin <= batch.position < end for begin, end in self._given_up)

    def count_skipped(self, samples: int) -> None:
        """Count samples that all ranks left out.

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
