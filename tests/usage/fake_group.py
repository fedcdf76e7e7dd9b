"""One rank of many, alone: what it would communicate is recorded, and answered with its own values.

So one process can walk the update of any rank of any number, and the records of two ranks of a group can be compared:
where kinds, groups and sizes differ, real ranks would wait for each other for ever. A second rank gets the answers that
the first has got, so that both agree on the same. It moves no tensor and sums none: to a sum the others add nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch import Tensor

from evenstep.errors import ReplicaError
from evenstep.parallel.group import Group

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective or message.

    Args:
        kind: "sum", "gather" and so on; with the other rank where it is a message to one.
        num_bytes: of the payload of this rank; 0 for values, whose size may differ between ranks.
    """

    kind: str
    group: str
    num_bytes: int = 0


class Fake(Group):
    """A rank whose collectives and messages are recorded.

    Args:
        ranks: how many there would be.
        name: of the group, in the records.
        said: where to record, such as the list of another group of the same rank.
        heard: the answers that another rank of this group has got (its `heard`), which this one then gets as well; by
            default everybody gathers what this rank gives, and adds nothing to its sums.

    >>> group = Fake(7, 512)
    >>> group.gather("hello")[511], group.sum_floats([1.0, 2.0])
    ('hello', [1.0, 2.0])
    >>> [(one.kind, one.group, one.num_bytes) for one in group.said]
    [('gather', 'all', 0), ('sum_floats', 'all', 16)]
    >>> other = Fake(8, 512, heard=group.heard)
    >>> other.gather("good day")[7:9], other.sum_floats([0.0, 0.0])
    (['hello', 'good day'], [1.0, 2.0])
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        name: str = "all",
        said: list[CollectiveRecord] | None = None,
        heard: Sequence[tuple[str, list[Any]]] | None = None,
    ) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self.said: list[CollectiveRecord] = [] if said is None else said
        self.heard: list[tuple[str, list[Any]]] = []
        self._script = None if heard is None else iter(heard)

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        self._say("sum_floats", 8 * len(values))
        heard = self._hear(list(values))
        return [other or own for own, other in zip(values, heard, strict=True)]  # with its own micro-batches

    def sum_of_same(self, value: float) -> float:
        return value  # the others add nothing, nor do they say otherwise

    def gather(self, value: T) -> list[T]:
        self._say("gather")
        everybody = list(self._hear([value] * self.ranks))
        everybody[self.rank] = value
        return everybody

    def _hear(self, own: list[Any]) -> list[Any]:
        mine = self.said[-1].kind
        kind, answer = (mine, own) if self._script is None else next(self._script, ("", own))
        if kind != mine or len(answer) != len(own):
            raise ReplicaError(
                f"rank {self.rank} of {self.ranks} says '{self.said[-1].kind}' to {self.name} as its word number "
                f"{len(self.said)}, where the rank that it follows has said something else."
            )
        self.heard.append((kind, answer))
        return answer

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        self._say("sum", _bytes(tensor))
        return lambda: None

    def send(self, tensor: Tensor, rank: int) -> None:
        self._say(f"send to {rank}", _bytes(tensor))

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._say(f"receive from {rank}", _bytes(tensor))

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], None]:
        self._say("all_to_all")  # whose sizes differ between ranks
        for rank, tensor in enumerate(received):
            if rank != self.rank:
                tensor.zero_()
        return lambda: None

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            self._say(f"broadcast from {rank}", _bytes(tensor))

    def _say(self, kind: str, num_bytes: int = 0) -> None:
        self.said.append(CollectiveRecord(kind, self.name, num_bytes))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
