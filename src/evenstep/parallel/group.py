"""The processes that train one model together, and what they say to each other.

Two kinds of words: small numbers between hosts, by which ranks agree before they act (`sum_floats`, `gather`), and
tensors on the device (`sum`, `send`, `receive`, `broadcast`). Every wait ends within the group's timeout. The default
is a group of one, for which nothing has to be said; it does no arithmetic of its own.
"""

import os
from collections.abc import Callable, Sequence
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

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        """Overwrite `tensors` with those of `rank`."""

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        """The ranks as torch's sharding needs them: copies × neighbouring `shard_ranks` that share one copy."""
        raise AssertionError("a group of one has nobody to share a copy with")

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
        timeout = timedelta(seconds=timeout_s)
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
        self._wait(f"send to rank {rank}", partial(dist.send, tensor, rank, group=self._devices))

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._wait(f"receive from rank {rank}", partial(dist.recv, tensor, rank, group=self._devices))

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            self._wait("broadcast", partial(dist.broadcast, tensor, rank, group=self._devices))

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
