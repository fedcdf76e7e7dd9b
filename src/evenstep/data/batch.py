"""Positions, micro-batches, global batches, and the base class of data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from evenstep.errors import DataError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Position(NamedTuple):
    """The global batch that is taken next: number `batch` of epoch `epoch`, both from 0. Earlier ones are smaller.

    >>> Position(epoch=2, batch=7)
    Position(epoch=2, batch=7)
    """

    epoch: int = 0
    batch: int = 0

    def after(self, *, ends_epoch: bool) -> "Position":
        """The position of the next global batch, given whether this one is the last of its epoch."""
        return Position(self.epoch + 1, 0) if ends_epoch else Position(self.epoch, self.batch + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFault:
    """Something that went wrong while a batch was fetched, and that the run survives.

    Args:
        message: what, and what was done about it.
        samples: the dataset's numbers of the samples that it is about.
        num_skipped: how many of them are left out.
        details: the traceback, or "".
    """

    message: str
    samples: Sequence[int] = ()
    num_skipped: int = 0
    details: str = ""


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every update, and freezing costs
class Microbatch:
    """What goes through forward and backward at once.

    Args:
        index: its number 0..n-1 in the global batch, counted over all ranks.
        data: the collated samples, on the CPU (in pinned memory if that was asked for).
        num_samples: how many samples it holds.
        samples: their numbers in the dataset, where they have some.
        task: the name of the task that it is for; "" where a run has one task without a name.
        counted: whether `num_samples` is known, and not told by the looks of a batch that came ready made.
        in_columns: whether lists in it are known to be columns, as torch's default collate function makes them, and not
            samples.
    """

    index: int
    data: object
    num_samples: int
    samples: Sequence[int] = ()
    task: str = ""
    counted: bool = True
    in_columns: bool = False

    @property
    def known_samples(self) -> int | None:
        """How many samples it holds, where that is known."""
        return self.num_samples if self.counted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One batch of one task in a global batch of several; its micro-batches are numbered one after the other.

    Args:
        num_microbatches: it was cut into, over all ranks.
        num_samples: over all ranks.
        data_s: how long this rank waited for it, in seconds.
    """

    task: str
    num_microbatches: int
    num_samples: int
    data_s: float = 0.0


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every update, and freezing costs
class GlobalBatch:
    """All samples of one update, of which this rank holds `microbatches`.

    Args:
        position: which batch this is.
        following: the position after it; what a checkpoint taken now resumes at.
        microbatches: this rank's, in order; may be none.
        num_microbatches: over all ranks.
        num_samples: over all ranks, those counted that a rank had to leave out.
        ends_epoch: whether `following` is in the next epoch.
        faults: what went wrong on this rank while it was fetched.
        parts: the batches that it is made of, in the order of their micro-batches; none for one batch of one task.
    """

    position: Position
    following: Position
    microbatches: tuple[Microbatch, ...]
    num_microbatches: int
    num_samples: int
    ends_epoch: bool
    faults: tuple[DataFault, ...] = ()
    parts: tuple[Part, ...] = ()


class Data(ABC):
    """A source of global batches that can start at any of its positions.

    Attributes:
        limit_batches: the most global batches of an epoch, to try things out; None for no limit.
    """

    limit_batches: int | None = None

    @abstractmethod
    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        """Give the global batches from `start` on, epoch after epoch.

        Args:
            seed: the run's seed; order and augmentation follow from it.
            rank: whose micro-batches, 0..ranks-1.
            ranks: how many data-parallel ranks share each global batch.
            pin_memory: whether batches are put in pinned memory, where there is an accelerator.

        Raises:
            DataError: the data cannot start at `start`; later, a sample or a worker fails.
        """

    def batches_together(
        self,
        start: Position,
        *,
        seed: int,
        rank: int,
        ranks: int,
        total: Callable[[Sequence[float]], Sequence[float]],
        pin_memory: bool = False,
    ) -> Iterator[GlobalBatch]:
        """The same, where only all ranks together know what a global batch is, as of streams without a length.

        Args:
            start, seed, rank, ranks, pin_memory: as for `batches`.
            total: sums numbers over all ranks; all ranks take their global batches together.

        Raises:
            DataError: as `batches`; or what ranks read does not go together, on all of them.
        """
        return self.batches(start, seed=seed, rank=rank, ranks=ranks, pin_memory=pin_memory)

    @abstractmethod
    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        """How many global batches `epoch` has; None where only reading tells."""

    @property
    def knows_length(self) -> bool:
        """Whether `num_batches` gives a number; asked where counting a whole epoch would be too much."""
        return self.num_batches(0, seed=0) is not None

    @abstractmethod
    def fingerprint(self) -> dict[str, JSON]:
        """What must be equal for a resumed run to be exact."""

    def cut(self) -> dict[str, JSON]:
        """What must be equal on all ranks besides, though not in a resumed run: how a global batch is cut."""
        return {}

    @property
    def tasks(self) -> tuple[str, ...] | None:
        """The names of the tasks that it has batches for; ("",) without names, None where only reading tells."""
        return ("",)

    @property
    def resumable(self) -> bool:
        """Whether `batches` can start at any position (of a stream: after `load_state_dict`)."""
        return True

    @property
    def moving_stream(self) -> object:
        """The stream that a second reader would move; None for data without one."""
        return None

    @property
    def state_is_of_rank(self) -> bool:
        """Whether `state_dict` is of this rank alone, and each rank must go on with its own."""
        return False

    def state_dict(self, at: Position | None = None) -> dict[str, object]:
        """What a resume needs beside the position; only streams need anything.

        Args:
            at: the position to resume at: that of the last global batch given, or the one after it, which is the
                default.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            DataError: the state is not of this data.
        """
        if state:
            raise DataError(
                f"{type(self).__name__} carries no state, but was given {sorted(state)}; "
                "the checkpoint is of other data: resume with the data it was written with."
            )

    def close(self) -> None:
        """Stop whatever runs in the background; the data may be used again after."""
