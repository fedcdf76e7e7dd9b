"""Other data whose global batches are changed, or left out, on their way; all else is theirs."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from evenstep.data.batch import JSON, Data, GlobalBatch, Position


class WrappedData(Data):
    """Data that are made of others: a subclass says what becomes of the global batches.

    Args:
        data: the others.
    """

    def __init__(self, data: Data) -> None:
        self.data = data

    @abstractmethod
    def through(self, start: Position, read: Callable[[Position], Iterator[GlobalBatch]]) -> Iterator[GlobalBatch]:
        """The global batches from `start` on.

        Args:
            read: gives those of the others from a position on.
        """

    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        read = partial(self.data.batches, seed=seed, rank=rank, ranks=ranks, pin_memory=pin_memory)
        return self.through(start, read)

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
        read = partial(
            self.data.batches_together, seed=seed, rank=rank, ranks=ranks, total=total, pin_memory=pin_memory
        )
        return self.through(start, read)

    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        return self.data.num_batches(epoch, seed=seed)

    @property
    def knows_length(self) -> bool:
        return self.data.knows_length

    def fingerprint(self) -> dict[str, JSON]:
        return self.data.fingerprint()

    def cut(self) -> dict[str, JSON]:
        return self.data.cut()

    @property
    def tasks(self) -> tuple[str, ...] | None:
        return self.data.tasks

    @property
    def resumable(self) -> bool:
        return self.data.resumable

    @property
    def state_is_of_rank(self) -> bool:
        return self.data.state_is_of_rank

    @property
    def unshared_stream(self) -> object:
        return self.data.unshared_stream

    def to_cut_finer(self, samples: int) -> str:
        return self.data.to_cut_finer(samples)

    def state_dict(self, at: Position | None = None) -> dict[str, object]:
        return self.data.state_dict(at)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.data.load_state_dict(state)

    def close(self) -> None:
        self.data.close()
