"""The processes that train one model together, and what they say to each other.

Two kinds of words: small numbers between hosts, by which ranks agree before they act (`sum_floats`, `gather`), and
tensors on the device (`sum`, `send`, `receive`, `broadcast`). Every wait ends within the group's timeout; who gives up
may leave word (`abort`) for those who look for it while they wait. The default
is a group of one, for which nothing has to be said; it does no arithmetic of its own.
"""

import logging
import os
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import ArgumentError, EvenstepError
from evenstep.parallel.place import place_of
from evenstep.parallel.rendezvous import meet

T = TypeVar("T")
_ABORTED = "evenstep/aborted"  # key of the store
_UNUSED_TAG = 2**30  # of a message that nobody sends


class Group:
    """A group of one process: every word is for oneself.

    >>> Group().sum_floats([1.0, 2.0]), Group().gather("hello")
    ([1.0, 2.0], ['hello'])
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = torch.device("cpu")  # where the tensors of its words are

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over all ranks, in float64."""
        return list(values)

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. Values are pickled between the processes of one job; never from a file."""
        return [value]

    def first_rank_does(self, act: Callable[[], T]) -> T:
        """Do something on the first rank only, such as writing a file; all get its result, or raise.

        Raises:
            EvenstepError: on the other ranks, when it raised on the first.
        """
        result, fault = None, ""
        raised: Exception | None = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as error:  # noqa: BLE001 - raised again below, once the others know
                raised, fault = error, f"{type(error).__name__} on rank 0: {error}"
        result, fault = self.gather((result, fault))[0]
        if raised is not None:
            raise raised
        if fault:
            raise EvenstepError(fault)
        return cast("T", result)

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum `tensor` over all ranks, in place; call the result to wait for it."""
        return _nothing

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send `tensor` to `rank`, which must receive it."""
        raise AssertionError("a group of one has nobody to send to")

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive into `tensor` what `rank` sends."""
        raise AssertionError("a group of one has nobody to receive from")

    def begin_send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to send `tensor`, which must not change meanwhile; call the result to wait until it has left."""
        raise AssertionError("a group of one has nobody to send to")

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        """Overwrite `tensors` with those of `rank`."""

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        """The ranks as torch's sharding needs them: copies × neighbouring `shard_ranks` that share one copy."""
        raise AssertionError("a group of one has nobody to share a copy with")

    def split(self, parts: Sequence[Sequence[int]]) -> "Group":
        """The group of the part that holds this rank; all ranks call it with the same parts, in the same order."""
        return Group()

    def abort(self, reason: str) -> None:
        """Leave the group for good and wake all who wait in it; of the reasons that ranks give the first is kept."""

    def abort_reason(self) -> str:
        """The first word that any rank has left by `abort`, or ""."""
        return ""

    def close(self) -> None:
        """Leave the group."""


def _nothing() -> None: ...


@final
class Processes(Group):
    """The processes that torchrun, or `evenstep train --launch.ranks`, has started.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them, or what srun sets. Hosts talk through
    gloo, devices through the backend of their kind.

    Args:
        device: of this rank's tensors.
        timeout_s: the longest wait for the other ranks, in seconds, at the rendezvous and in every collective.

    Raises:
        ArgumentError: the environment is not that of a launched rank.
        EvenstepError: the other ranks did not come within the timeout.
    """

    def __init__(self, device: torch.device, *, timeout_s: float = 60.0) -> None:
        place = place_of(os.environ)
        if place is None:
            raise ArgumentError(
                "a rank among several needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; start "
                "the run with torchrun, or with `--launch.ranks`."
            )
        self.rank, self.ranks = place.rank, place.ranks
        self._timeout = timeout = timedelta(seconds=timeout_s)
        store = meet(place, timeout_s=timeout_s)
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise EvenstepError(
                f"{place} met the others, but could not connect to each of them within {timeout_s:g} s: "
                f"{str(error).splitlines()[0]} Check that no firewall stands between them, and that gloo takes the "
                f"right network (GLOO_SOCKET_IFNAME names it)."
            ) from error
        self.device = device
        self._timeout_s = timeout_s
        self._hosts = cast("dist.ProcessGroup", dist.group.WORLD)
        self._devices = self._hosts
        if device.type == "cuda":
            self._devices = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=timeout))
        self._store = cast("Any", dist.distributed_c10d)._get_default_store()

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        self._wait("sum numbers", partial(dist.all_reduce, total, group=self._hosts))
        return cast("list[float]", total.tolist())

    def gather(self, value: T) -> list[T]:
        everybody: list[Any] = [None] * self.ranks
        self._wait("gather values", partial(dist.all_gather_object, everybody, value, group=self._hosts))
        return everybody

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        work = cast("dist.Work", dist.all_reduce(tensor, group=self._devices, async_op=True))
        return partial(self._wait, "sum gradients", work.wait)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._wait(f"send to rank {rank}", partial(dist.send, tensor, group=self._devices, group_dst=rank))

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._wait(f"receive from rank {rank}", partial(dist.recv, tensor, group=self._devices, group_src=rank))

    def begin_send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        work = cast("dist.Work", dist.isend(tensor, group=self._devices, group_dst=rank))
        return partial(self._wait, f"send to rank {rank}", work.wait)

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            self._wait("broadcast", partial(dist.broadcast, tensor, group=self._devices, group_src=rank))

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        mine = copy(self)
        for part in parts:
            hosts = dist.new_group(list(part), timeout=self._timeout, backend="gloo")
            devices = hosts
            if self._devices is not self._hosts:
                devices = dist.new_group(list(part), timeout=self._timeout, backend="nccl")
            if self.rank in part:
                mine.rank, mine.ranks = part.index(self.rank), len(part)
                mine._hosts, mine._devices = cast("dist.ProcessGroup", hosts), cast("dist.ProcessGroup", devices)
        return mine

    def abort(self, reason: str) -> None:
        try:
            self._store.compare_set(_ABORTED, "", reason)
        except RuntimeError as error:  # the rank that holds the store has gone, and the others see that by themselves
            logging.getLogger(__name__).debug("no word could be left: %s", error)
        if self.ranks == 1 or self._devices is not self._hosts:
            return
        try:
            # gloo closes all connections of the group when a wait times out: whoever waits on either side is woken
            other = (self.rank + 1) % self.ranks
            work = dist.irecv(torch.empty(1), group=self._hosts, group_src=other, tag=_UNUSED_TAG)
            cast("dist.Work", work).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            logging.getLogger(__name__).debug("the connections are closed: %s", error)

    def abort_reason(self) -> str:
        try:
            return self._store.get(_ABORTED).decode() if self._store.check([_ABORTED]) else ""
        except RuntimeError as error:
            return f"the rank that keeps the run's store has gone ({str(error).splitlines()[0]})"

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        if shard_ranks == self.ranks:
            return DeviceMesh.from_group(self._devices, self.device.type)
        ranks = torch.arange(self.ranks).view(-1, shard_ranks)
        copies, shards = (self._own_of(lines) for lines in (ranks.T, ranks))
        names = ("copies", "shards")
        return DeviceMesh.from_group([copies, shards], self.device.type, mesh=ranks, mesh_dim_names=names)

    def _own_of(self, lines: Tensor) -> dist.ProcessGroup:
        """A group for each line of ranks, made by all of them in the same order; gives the one this rank is in."""
        timeout = timedelta(seconds=self._timeout_s)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        made = [dist.new_group(line, backend=backend, timeout=timeout) for line in cast("Any", lines).tolist()]
        own = next(group for line, group in zip(cast("Any", lines).tolist(), made, strict=True) if self.rank in line)
        return cast("dist.ProcessGroup", own)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:
            raise EvenstepError(
                f"rank {self.rank} of {self.ranks} could not {what}: {str(error).splitlines()[0]} Another rank has "
                f"failed, or did not come within {self._timeout_s:g} s; look at the first error of the others."
            ) from error
