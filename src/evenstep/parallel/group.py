"""The processes that train one model together, and how they communicate.

Hosts agree on values (`sum_floats`, `gather`), devices exchange tensors, and members meet again after an interruption.
"""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar, cast, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evenstep.arguments import require_whole
from evenstep.errors import ArgumentError, EvenstepError, LostRankError

T = TypeVar("T")


class Interrupted(LostRankError):
    """Another rank interrupted the current work and waits for this rank."""


class Group:
    """A group of one process, and the interface of all groups.

    >>> Group().sum_floats([1.0, 2.0]), Group().gather("hello")
    ([1.0, 2.0], ['hello'])
    """

    rank: int = 0
    ranks: int = 1
    part_of: int = 0  # size of the group from which this one was split; 0: it has all ranks
    can_change: bool = False  # True if ranks may leave and come between two updates
    device: torch.device = torch.device("cpu")  # of the tensors that are sent and summed

    # Values of hosts: all ranks call these together.

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over all ranks, in float64."""
        return list(values)

    def sum_of_same(self, value: float) -> float:
        """Result of `sum_floats` for a number that is equal on all ranks."""
        return self.ranks * value

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. Values are pickled between the processes of one job; never from a file."""
        return [value]

    def first_rank_does(self, act: Callable[[], T]) -> T:
        """Do something on the first rank only, such as writing a file; all get its result, or raise."""
        if self.rank:
            result, fault = cast("tuple[T, str]", self.gather((None, ""))[0])
            if fault:
                raise EvenstepError(fault)
            return result
        try:
            result = act()
        except Exception as error:
            self.gather((None, f"{type(error).__name__} on rank 0: {error}"))
            raise
        return self.gather((result, ""))[0][0]

    # Tensors of devices.

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum `tensor` over all ranks, in place; call the result to wait for it."""
        return _nothing

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        """Begin to send `tensor`, which must not change meanwhile; call the result to wait until it has left.

        Messages of one channel arrive in order; tensors on hosts only have several channels.
        """
        raise NotImplementedError

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        """Begin to receive into `tensor` what `rank` sends, which on hosts may be shorter; call the result to wait."""
        raise NotImplementedError

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to exchange tensors with each other rank, unless they are empty; call the result to wait."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        waits = [self.begin_receive(received[rank], rank) for rank in others if received[rank].numel()]
        waits += [self.begin_send(sent[rank], rank) for rank in others if sent[rank].numel()]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        """Overwrite `tensors` with the tensors of `rank`."""

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        """The ranks as torch's sharding needs them: "dp" copies of the model × neighbouring "shard" ranks of one."""
        raise ArgumentError(
            "with `fsdp` ranks share one copy of the model, but the strategy has a group of one; leave `strategy` out.",
            field="fsdp",
        )

    def split(self, parts: Sequence[Sequence[int]]) -> "Group":
        """The group of the part that holds this rank; all ranks call it with the same parts."""
        return Group()

    # Members: who is there, and what ends the work that they do together.

    def begin_work(self) -> int:
        """Begin what all ranks compute together next; gives its number, the same on all ranks."""
        return 0

    def interrupt(self, reason: str) -> None:
        """Interrupt the current work of all ranks, whose collectives raise `Interrupted`; then all `meet`."""

    def interrupted(self) -> str:
        """Reason of another rank for interrupting the current work; "" without one."""
        return ""

    def meet(self, value: T) -> list[T]:
        """After `interrupt`: wait for all ranks, reconnect them, and gather their values by rank."""
        return [value]

    def fail(self, message: str) -> None:
        """Post that this rank fails, and why; all who wait for it raise soon."""

    def go_on(self) -> None:
        """Forget failures after an error that all ranks have raised and handled."""

    def explained(self, error: BaseException) -> BaseException:
        """`error`, or a LostRankError if one of torch's collectives raised it."""
        return error

    def at(self, update: int) -> None:
        """Note which update is being computed, for messages."""

    def close(self) -> None:
        """Leave the group."""


def _nothing() -> None: ...


@final
class Mesh:
    """The ranks of a run as pipelines × replicas; all ranks build it together.

    Rank = pipeline rank · replicas + data rank. All ranks of one pipeline read the same batches.

    Attributes:
        data: the ranks that hold the same stages and sum their gradients.
        pipeline: the ranks that hold the stages of one replica, in the order of their stages.
        replicas: ranks of the world in `data`.
    """

    def __init__(self, world: Group | None = None, pipeline: int = 1) -> None:
        self.world = world or Group()
        count = self.world.ranks
        replicas = count // pipeline
        lines = [list(range(first, count, replicas)) for first in range(replicas)]
        self.pipeline = self._part(lines)
        lines = [list(range(first, first + replicas)) for first in range(0, count, replicas)]
        self.data = self._part(lines)
        self.replicas = lines[self.world.rank // replicas]

    @classmethod
    def of(cls, world: Group, *, pipeline: int = 1) -> Self:
        """Divide `world` into pipelines of `pipeline` ranks; all ranks call it together.

        >>> Mesh.of(Group()).data.ranks
        1
        """
        require_whole("pipeline", pipeline)
        if world.ranks % pipeline:
            raise ArgumentError(
                f"`ranks` must be a multiple of the {pipeline} pipeline ranks, but is {world.ranks}; start another "
                f"number of ranks, or change `pipeline`.",
                field="ranks",
            )
        return cls(world, pipeline)

    def _part(self, lines: list[list[int]]) -> Group:
        if len(lines) == 1:
            return self.world
        if len(lines[0]) > 1:
            return self.world.split(lines)
        alone = Group()
        alone.part_of = self.world.ranks
        return alone
