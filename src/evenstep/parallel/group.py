"""The processes that train one model together, and what they say to each other.

Two kinds of words: small numbers between hosts, by which ranks agree before they act (`sum_floats`, `gather`), and
tensors on the device (`sum`, `send`, `receive`, `broadcast`). Every wait ends within the group's timeout, and within
seconds if another rank says that it has failed. The default is a group of one, for which nothing has to be said; it
does no arithmetic of its own.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic, perf_counter
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from evenstep.errors import ArgumentError, EvenstepError, LostRankError
from evenstep.parallel.flight import Entry, Flight
from evenstep.parallel.notices import Notices

T = TypeVar("T")
_A_WHILE = timedelta(seconds=1)


class Group:
    """A group of one process: every word is for oneself.

    >>> Group().sum_floats([1.0, 2.0]), Group().gather("hello")
    ([1.0, 2.0], ['hello'])
    """

    rank: int = 0
    ranks: int = 1
    waited_s: float = 0.0  # for other ranks, in all
    update: int = 0  # that is being computed, for messages

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

    def fail(self, message: str) -> None:
        """Tell the others that this rank fails, and why, so that they need not wait for it."""

    def recorded(self) -> list[str]:
        """The last things that were said or waited for, in words."""
        return []

    def close(self) -> None:
        """Leave the group."""


def _nothing() -> None: ...


@final
class Processes(Group):
    """The processes that torchrun, or `evenstep train --launch.ranks`, has started.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Hosts talk through gloo, devices
    through the backend of their kind.

    Args:
        device: of this rank's tensors.
        timeout_s: the longest wait for the other ranks, in seconds, at the rendezvous and in every collective.

    Raises:
        ArgumentError: the environment is not that of a launched rank.
        EvenstepError: the other ranks did not come within the timeout.
    """

    def __init__(self, device: torch.device, *, timeout_s: float = 60.0) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ArgumentError(
                f"a rank among several needs {', '.join(missing)} in its environment; start the run with torchrun, or "
                f"with `--launch.ranks`."
            )
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=timeout_s)
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # Ranks that are started again find another attempt's keys in the launcher's store: each uses its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            store = next(rendezvous("env://", self.rank, self.ranks, timeout=timeout))[0]
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"attempt-{attempt}", store),
                rank=self.rank,
                world_size=self.ranks,
                timeout=timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise EvenstepError(
                f"rank {self.rank} of {self.ranks} did not find the others at {address} within {timeout_s:g} s: "
                f"{str(error).splitlines()[0]} Check that all ranks were started with the same address and number of "
                f"ranks, and that a firewall does not stand between them."
            ) from error
        self._timeout_s = timeout_s
        self._notices = Notices(PrefixStore(f"notices-{attempt}", store), self.rank, self.ranks)
        self._flight = Flight()
        self._hosts = cast("dist.ProcessGroup", dist.group.WORLD)
        self._devices = self._hosts
        if device.type == "cuda":
            self._devices = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=timeout))

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        self._do("sum numbers", total, partial(dist.all_reduce, total, group=self._hosts, async_op=True))
        return cast("list[float]", total.tolist())

    def gather(self, value: T) -> list[T]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        size = torch.tensor([mine.numel()])
        self._do("gather values", size, partial(dist.all_gather, sizes, size, group=self._hosts, async_op=True))
        room = max(int(one) for one in sizes)
        padded = torch.cat([mine, mine.new_zeros(room - mine.numel())])
        every = [torch.empty(room, dtype=torch.uint8) for _ in range(self.ranks)]
        self._do("gather values", padded, partial(dist.all_gather, every, padded, group=self._hosts, async_op=True))
        return [pickle.loads(one[: int(size)].numpy().tobytes()) for one, size in zip(every, sizes, strict=True)]

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        entry = self._flight.begin("sum gradients", tensor.nbytes, update=self.update)
        try:
            work = cast("dist.Work", dist.all_reduce(tensor, group=self._devices, async_op=True))
        except RuntimeError as error:
            raise self._lost(entry.what, error) from error
        return partial(self._finish, entry, work)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._do(f"send to rank {rank}", tensor, partial(dist.isend, tensor, rank, group=self._devices))

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._do(f"receive from rank {rank}", tensor, partial(dist.irecv, tensor, rank, group=self._devices))

    def broadcast(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        for tensor in tensors:
            self._do(
                "broadcast",
                tensor,
                partial(dist.broadcast, tensor, rank, group=self._devices, async_op=True),
            )

    def fail(self, message: str) -> None:
        at = f"rank {self.rank} failed at update {self.update}: {message.splitlines()[0] if message else 'no word'}"
        self._notices.post(at)

    def recorded(self) -> list[str]:
        return self._flight.last()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _do(self, what: str, tensor: Tensor, begin: Callable[[], object]) -> None:
        entry = self._flight.begin(what, tensor.nbytes, update=self.update)
        try:
            work = cast("dist.Work", begin())
        except RuntimeError as error:
            raise self._lost(what, error) from error
        self._finish(entry, work)

    def _finish(self, entry: Entry, work: Any) -> None:
        began = perf_counter()
        try:
            # What runs on a device, and messages between two, can't be waited for a little at a time.
            if self._devices is self._hosts and not entry.what.startswith(("send", "receive")):
                self._wait_by_and_by(work)
            else:
                work.wait()
        except RuntimeError as error:
            raise self._lost(entry.what, error) from error
        self.waited_s += perf_counter() - began
        self._flight.end(entry)

    def _wait_by_and_by(self, work: Any) -> None:
        """Wait, and look now and then whether a rank has said that it failed, or asks who is there."""
        until = monotonic() + self._timeout_s
        while True:
            try:
                work.wait(_A_WHILE)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises, unless it came to its end in this moment
                    return
                if monotonic() > until or self._notices.failure():
                    raise
                self._notices.answer()
            else:
                return

    def _lost(self, what: str, error: RuntimeError) -> LostRankError:
        """Who is missing, as far as it can be found out within seconds."""
        timed_out = any(word in str(error).lower() for word in ("timed out", "timeout"))
        failure = self._notices.failure()
        missing = None if failure else self._notices.missing()
        failure = failure or self._notices.failure()
        if failure:
            cause = f"{failure}."
        elif missing is None:
            cause = "rank 0, through which ranks find each other, is gone or frozen."
        elif missing:
            ranks = ", ".join(map(str, missing))
            cause = f"rank {ranks} did not come within {self._timeout_s:g} s" if timed_out else f"rank {ranks} is gone"
            cause += "; look at what it said last, and at its machine."
        else:
            cause = f"{str(error).splitlines()[0]} All ranks are there: the network between them may be broken."
        if not failure:
            self._notices.post(f"rank {self.rank} could not {what} in update {self.update}: {cause}")
        return LostRankError(f"rank {self.rank} of {self.ranks} could not {what} in update {self.update}: {cause}")
