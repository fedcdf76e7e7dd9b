"""A group of processes that a launcher has started: gloo between hosts, the backend of their kind between devices.

Every wait ends within the timeout, and within seconds of the notice that another rank fails.
"""

import atexit
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import ArgumentError, EvenstepError, LostRankError, clause
from evenstep.parallel.group import Group, Interrupted
from evenstep.parallel.membership import ANSWER_S, Membership, connect
from evenstep.parallel.rank_info import RankInfo, rank_info_of
from evenstep.parallel.renewable import GLOO, NCCL, Connections
from evenstep.tensors import device_here, make_current

T = TypeVar("T")
_dist = cast("Any", dist)  # whose functions have types in part
_LETTING_GO_S = 0.05
_CONNECTING_S = 10.0  # for ranks that have just met
_HEAD_BYTES = 8  # before a value that is gathered: its length
_FEW_NUMBERS = 8  # to whose multiple sums are filled up
_SHORT_BYTES = 240  # bytes of a gathered value that fit in the first message
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}  # formats that all backends send, by size
_TOGETHER = "Call `train`, `evaluate`, `save`, `gather` and the like on all ranks at the same point"
_JOINED: dict[torch.device, Group] = {}  # a process can join the others only once


@final
class Processes(Group):
    """The processes that torchrun, or `evenstep train --launch.ranks`, has started.

    Hosts talk through gloo, devices through the backend of their kind; where ranks share a device, through copies on
    the host, as NCCL refuses two ranks on one device. The device becomes torch's current one.

    Args:
        timeout_s: the longest wait for the other ranks, in seconds, at the rendezvous and in every collective.
        info: this rank's place; by default that of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or of srun.
        meeting_s: the longest wait at the rendezvous; `timeout_s` by default.
        answer_s: after how many seconds without a heartbeat a rank is taken for lost.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        timeout_s: float = 60.0,
        info: RankInfo | None = None,
        meeting_s: float | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        info = info or rank_info_of(os.environ)
        if info is None:
            raise ArgumentError("this process is no rank of a run; start it with torchrun, or with `--launch.ranks`.")
        if dist.is_initialized():
            raise ArgumentError(
                "`torch.distributed` is initialized in this process already, but evenstep connects ranks itself; leave "
                "`init_process_group` out, or call `torch.distributed.destroy_process_group()` before."
            )
        self.device = device_here(torch.device(device))
        make_current(self.device)
        self.rank, self.ranks = info.rank, info.ranks
        self._timeout_s = timeout_s
        self._global_ranks = list(range(self.ranks))  # the global ranks of this group
        self._meeting_place = "the launcher" if info.store_is_served else "rank 0"
        store = connect(info, meeting_s or timeout_s)
        self._table = Connections(store, self.rank, self.ranks, timedelta(seconds=timeout_s))
        holds_store = self.rank == 0 and not info.store_is_served
        self._members = Membership(
            store, self.rank, self.ranks, self._table.breaker, answer_s=answer_s, holds_store=holds_store
        )
        try:
            self._join(f"{info.address}:{info.port}", meeting_s or timeout_s)
        except BaseException:
            self._members.leave(waits=holds_store)
            raise

    def _join(self, at: str, timeout_s: float) -> None:
        """Wait for all ranks and connect to each; all raise the same error if one does not come."""
        is_cuda, place = self.device.type == "cuda", str(self.rank)
        if is_cuda:
            place = f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"
        places, missing = self._members.meet(place.encode(), timeout_s)
        if not places:
            raise self._given_up("join", self._absent(missing, f"did not come to {at} within {timeout_s:g} s"))
        self._members.epoch += 1
        try:
            self._hosts = self._devices = self._table.get(GLOO, self._global_ranks)
        except (RuntimeError, ValueError) as error:
            raise EvenstepError(
                f"rank {self.rank} of {self.ranks} met the others, but could not connect to each of them within "
                f"{self._timeout_s:g} s: {str(error).splitlines()[0]} Check the firewall, and name the network in "
                f"GLOO_SOCKET_IFNAME."
            ) from error
        self._share_devices = len(set(places)) < self.ranks
        self._has_devices = is_cuda and not self._share_devices
        if self._has_devices:
            self._devices = self._table.get(NCCL, self._global_ranks)
        self._parts = [self]  # with those that were split off
        self._has_failed = False
        self._process = os.getpid()
        atexit.register(self.close)  # an error that nobody catches ends the process without it

    def at(self, update: int) -> None:
        self._members.update = update

    def _where(self) -> str:
        update = self._members.update
        return f" in update {update}" if update else " before the first update"

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        # few numbers go in messages of one size, as gloo ends a process that gets a longer one than it waits for
        room = -len(values) % _FEW_NUMBERS
        total = torch.tensor([*values, *[0.0] * room], dtype=torch.float64)
        self._begin("sum numbers", total, partial(dist.all_reduce, group=self._hosts, async_op=True))()
        return cast("list[float]", total.tolist())[: len(values)]

    def gather(self, value: T) -> list[T]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        # a short value goes with its length, in one message
        first = torch.zeros(_HEAD_BYTES + _SHORT_BYTES, dtype=torch.uint8)
        first[:_HEAD_BYTES] = torch.tensor([mine.numel()]).view(torch.uint8)
        first[_HEAD_BYTES : _HEAD_BYTES + mine.numel()] = mine[:_SHORT_BYTES]
        every = self._gather(first)
        sizes = [int(one[:_HEAD_BYTES].view(torch.int64)) for one in every]
        every = [one[_HEAD_BYTES:] for one in every]
        room = max(sizes)
        if room > _SHORT_BYTES:
            every = self._gather(torch.cat([mine, mine.new_zeros(room - mine.numel())]))
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in zip(every, sizes, strict=True)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._begin("gather values", mine, partial(dist.all_gather, every, group=self._hosts, async_op=True))()
        return every

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        return self._begin(
            "sum gradients", tensor, lambda one: _dist.all_reduce(one, group=self._of(one), async_op=True)
        )

    def begin_send(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        return self._begin(
            f"send to rank {rank}", tensor, lambda one: self._of(one).send([one], rank, channel), comes_back=False
        )

    def begin_receive(self, tensor: Tensor, rank: int, channel: int = 0) -> Callable[[], None]:
        return self._begin(f"receive from rank {rank}", tensor, lambda one: self._of(one).recv([one], rank, channel))

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], None]:
        own = sent[self.rank]
        if self._share_devices or self._of(own) is self._hosts:
            return super().all_to_all(sent, received)  # gloo's own exchange is slow
        everything = list(received)
        everything[self.rank] = torch.empty_like(own)
        return self._begin(
            "exchange gradients",
            own,
            lambda _: _dist.all_to_all(everything, list(sent), group=self._devices, async_op=True),
        )

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            plain = tensor.detach().conj() if tensor.is_conj() else tensor.detach()
            real = torch.view_as_real(plain) if plain.is_complex() else plain
            self._begin(
                "broadcast",
                real.view(_BITS[real.itemsize]),
                lambda one: _dist.broadcast(one, group=self._of(one), group_src=rank, async_op=True),
            )()

    def _of(self, tensor: Tensor) -> dist.ProcessGroup:
        return self._hosts if tensor.device.type == "cpu" else self._devices

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        part = next(part for part in parts if self.rank in part)
        mine = copy(self)
        mine.rank, mine.ranks = list(part).index(self.rank), len(part)
        mine.part_of = self.ranks if len(part) < self.ranks else self.part_of
        mine._global_ranks = [self._global_ranks[rank] for rank in part]
        mine._hosts = mine._devices = self._table.get(GLOO, mine._global_ranks)
        if self._has_devices:
            mine._devices = self._table.get(NCCL, mine._global_ranks)
        self._parts.append(mine)
        return mine

    def mesh(self, shard_ranks: int) -> DeviceMesh:
        if self._share_devices:
            raise ArgumentError(
                f"with `fsdp` each rank needs its own device, but ranks share {self.device}; take `ddp`."
            )
        if shard_ranks == self.ranks:
            return DeviceMesh.from_group(self._devices, self.device.type, mesh_dim_names=("shard",))
        grid = torch.tensor(self._global_ranks).view(-1, shard_ranks)
        column, row = grid[:, self.rank % shard_ranks], grid[self.rank // shard_ranks]
        backend = NCCL if self._has_devices else GLOO
        groups = [self._table.get(backend, cast("list[int]", line.tolist())) for line in (column, row)]
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=("dp", "shard"))

    def begin_work(self) -> int:
        self._table.begin_work()
        return self._members.begin_work()

    def interrupt(self, reason: str) -> None:
        self._members.interrupt(reason)
        self._table.breaker()()

    def interrupted(self) -> str:
        return self._members.interrupted()

    def meet(self, value: T) -> list[T]:
        return self._meet("meet the others again", value, self._timeout_s)

    def _meet(self, what: str, value: T, timeout_s: float, *, after_failure: bool = False) -> list[T]:
        members = self._members
        while True:
            self._table.breaker()()
            told, gone = members.meet(pickle.dumps(value), timeout_s, after_failure=after_failure)
            if not told:
                raise self._given_up(what, self._absent(gone))
            members.epoch += 1
            try:
                self._table.renew(members.epoch, timedelta(seconds=min(_CONNECTING_S, self._timeout_s)))
            except RuntimeError as error:
                if not members.over():  # else a rank that was through with this before has interrupted again
                    raise self._lost("connect to the others again", error) from error
            else:
                members.break_if_over()  # a rank may have interrupted meanwhile
                return [pickle.loads(one) for one in told]

    def fail(self, message: str) -> None:
        self._has_failed = True
        line = message.splitlines()[0] if message else "without a message"
        self._members.fail(f"rank {self.rank} failed{self._where()}: {line}")

    def go_on(self) -> None:
        if self._has_failed:
            self._meet("go on", None, ANSWER_S, after_failure=True)
            self._has_failed = False

    def explained(self, error: BaseException) -> BaseException:
        of_torch = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))
        return self._lost("share the model", error) if of_torch else error

    def close(self, *, waits: bool = True) -> None:
        """Leave the group, after a wait for those that have not yet read why ranks fail."""
        atexit.unregister(self.close)
        if not dist.is_initialized() or os.getpid() != self._process:
            return
        self._members.leave(waits=waits)
        dist.destroy_process_group()
        # gloo's threads release the last tensors shortly after the wait, and need Python for that.
        # If it is gone by then the process ends with SIGABRT; so end the threads first, or at least let them go on.
        for part in self._parts:
            for name in ("_hosts", "_devices"):
                vars(part).pop(name, None)
        sleep(_LETTING_GO_S)

    def _begin(
        self, what: str, tensor: Tensor, act: Callable[[Tensor], object], *, comes_back: bool = True
    ) -> Callable[[], None]:
        carried = tensor.detach().cpu() if self._share_devices and tensor.device.type != "cpu" else tensor
        try:
            work: Any = act(carried)
        except RuntimeError as error:
            raise self._lost(what, error) from error

        def wait() -> None:
            self._members.waits = True
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(what, error) from error
            self._members.waits = False  # a rank that raises stays one that has come
            if carried is not tensor and comes_back:
                tensor.detach().copy_(carried)

        return wait

    def _lost(self, what: str, error: BaseException) -> LostRankError:
        reason = self._members.over()
        if reason and not self._members.known_failure:
            return Interrupted(f"rank {self.rank} of {self.ranks} could not {what}{self._where()}: {clause(reason)}.")
        return self._given_up(what, "" if reason else self._cause(error))

    def _cause(self, error: BaseException) -> str:
        if left := self._members.left:
            return f"the program of rank {', '.join(map(str, left))} has ended; see what it said last. {_TOGETHER}."
        is_late = any(word in str(error).lower() for word in ("timed out", "timeout"))
        missing = self._members.absent(is_late=is_late)
        if missing or missing is None:
            return self._absent(missing or [], f"did not come within {self._timeout_s:g} s" if is_late else "is gone")
        return f"{str(error).splitlines()[0]} All ranks are there. {_TOGETHER}; in a hook, use `request_save`."

    def _given_up(self, what: str, cause: str) -> LostRankError:
        failure = self._members.failure()  # of a rank that knows more
        if not failure:
            self._members.fail(f"rank {self.rank} could not {what}{self._where()}: {cause}")
        cause = f"{clause(failure)}." if failure else cause
        return LostRankError(f"rank {self.rank} of {self.ranks} could not {what}{self._where()}: {cause}")

    def _absent(self, ranks: Sequence[int], did: str = "is gone") -> str:
        if not ranks:
            return f"{self._meeting_place}, through which ranks find each other, is gone or frozen."
        return f"rank {', '.join(map(str, ranks))} {did}; look at what it said last, and at its machine."


def launched_group(device: torch.device) -> Group:
    """The ranks that a launcher has started, for as long as this process lives; a group of one where none has."""
    info = rank_info_of(os.environ)
    if info is None or info.ranks == 1:
        return Group()
    if device not in _JOINED:
        _JOINED[device] = Processes(device)
    return _JOINED[device]


def device_of_rank(name: str) -> torch.device:
    """The device by this name; "auto" and "cuda" are one accelerator for each rank, where a machine has several."""
    info = rank_info_of(os.environ)
    if name in ("auto", "cuda") and info is not None and torch.cuda.is_available():
        return torch.device("cuda", info.local_rank % torch.cuda.device_count())
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
