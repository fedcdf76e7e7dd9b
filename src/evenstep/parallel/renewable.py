"""Process groups that can be closed and reconnected.

An inner torch group does the work: `breaker` closes its connections, `renew` forms another between the same ranks.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic, sleep
from typing import Any, cast, final

import torch
import torch.distributed as dist

from evenstep.internals import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    group_around,
    name_of_group,
    nccl_around,
    set_timeout,
)
from evenstep.parallel.rendezvous import wait_until

GLOO, NCCL = "renewable_gloo", "renewable_nccl"  # names of backends for torch
_UNUSED_TAG = 2**30  # of a message that nobody sends
_LOOKED_EVERY_S = 0.001
_LONGEST_PAUSE_S = 0.05  # between two looks for the others
_COLLECTIVES = (
    "_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced all_to_all_single allgather "
    "allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier "
    "broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter reduce_scatter_single "
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send"
)


class Renewable(ProcessGroup):
    """A process group of torch that can be closed and reconnected.

    Args:
        store: through which its ranks find each other in each attempt.

    Attributes:
        inner: torch's own group, of this attempt.
    """

    _kind: Any = ProcessGroup.BackendType.GLOO
    _device_type = "cpu"
    inner: Any
    _backend: Any

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        cast("Any", super()).__init__(rank, ranks)  # the way for groups that are written in Python
        self._store, self._rank, self._ranks, self._timeout = store, rank, ranks, timeout
        self.renew(0, timeout)

    def renew(self, attempt: int, timeout: timedelta) -> None:
        """Form the group of this attempt, whose number no earlier one had; all its ranks call it together."""
        store = PrefixStore(f"attempt {attempt}", self._store)
        self._wait_for_all(store, timeout.total_seconds())
        backend = self._connected(store, timeout)
        self.inner = group_around(backend, self._kind, self._device_type, store, self._rank, self._ranks)
        self._backend = backend

    def _connected(self, store: Store, timeout: timedelta) -> Any:
        backend = ProcessGroupGloo(store, self._rank, self._ranks, timeout=timeout)
        set_timeout(backend, self._timeout)
        return backend

    def _wait_for_all(self, store: Store, timeout_s: float) -> None:
        store.add("came", 1)
        if not wait_until(lambda: store.add("came", 0) >= self._ranks, timeout_s, longest_s=_LONGEST_PAUSE_S):
            raise RuntimeError(f"{store.add('came', 0)} of {self._ranks} ranks came to it.")

    def begin_work(self) -> None:
        """Let collectives started so far end, even if the connections are closed later."""

    def breaker(self) -> Callable[[], None]:
        """Function that closes the connections of now, whose collectives then raise; any thread may call it."""
        return partial(self._break, self._backend)

    def _break(self, backend: Any) -> None:
        if backend is None:  # let go of
            return
        for step in range(1, self._ranks):
            other = (self._rank + step) % self._ranks
            # gloo closes all of a group's connections when a wait for a message times out, and has no other way to
            with suppress(RuntimeError):
                backend.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def shutdown(self) -> None:
        self.inner = self._backend = None

    @property
    def group_name(self) -> Any:
        """The name by which functional collectives find the group."""
        return name_of_group(self)

    def getBackendName(self) -> str:
        return GLOO


@final
class RenewableNccl(Renewable):
    """The same for tensors on CUDA devices; so far it has been run by one rank alone, not by several."""

    _kind = ProcessGroup.BackendType.NCCL
    _device_type = "cuda"
    _begun: torch.cuda.Event | None = None
    _device: torch.device

    def begin_work(self) -> None:
        self._begun = self._begun or torch.cuda.Event()
        self._begun.record()  # pyright: ignore[reportUnknownMemberType]

    def _connected(self, store: Store, timeout: timedelta) -> Any:
        self._device = torch.device("cuda", torch.cuda.current_device())
        return nccl_around(store, self._rank, self._ranks, self._timeout, self._device)

    def shutdown(self) -> None:
        backend = self._backend
        super().shutdown()
        if backend is not None:
            with suppress(RuntimeError):  # broken before
                backend.shutdown()

    def _break(self, backend: Any) -> None:
        if backend is not None:
            Thread(target=self._abort, args=(backend, self._begun), daemon=True).start()

    def _abort(self, backend: Any, begun: torch.cuda.Event | None) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with the first one, on which it would take memory
        until = monotonic() + self._timeout.total_seconds()
        while begun is not None and not begun.query() and monotonic() < until:
            sleep(_LOOKED_EVERY_S)
        backend.abort()

    def getBackendName(self) -> str:
        return NCCL


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: Renewable, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in _COLLECTIVES.split():
    if hasattr(ProcessGroup, _name):  # which there are depends on the version of torch
        setattr(Renewable, _name, _forwarded(_name))


@final
class Connections:
    """All groups of one process, closed and reconnected together.

    A rank breaks them in the midst of the work that is broken off, not before: of the work before it may still read
    what the others have sent.

    Attributes:
        attempt: the number of the groups that there are now.
        work: the number of what this rank computes with the others, the same on all ranks.
    """

    def __init__(self) -> None:
        self.attempt = self.work = 0
        self._broken_off = -1, 0  # an attempt, and the work of it
        self._groups: list[Renewable] = []

    def add(self, group: Any) -> Any:
        if isinstance(group, Renewable) and not any(group is one for one in self._groups):
            self._groups.append(group)
        return group

    def begin_work(self) -> int:
        """Begin the next work; gives its number."""
        for group in self._groups:
            group.begin_work()
        self.work += 1
        self._break_in_work()
        return self.work

    def break_off(self, attempt: int, work: int) -> None:
        """A rank breaks off a work in an attempt: break the groups as soon as this rank has begun it.

        Any thread may call it. An older attempt is over: all have formed newer groups since.
        """
        self._broken_off = attempt, work
        self._break_in_work()

    def break_(self) -> None:
        """Break the groups that there are now."""
        for group in self._groups:
            group.breaker()()

    def _break_in_work(self) -> None:
        breakers = [group.breaker() for group in self._groups]
        attempt, work = self._broken_off
        if attempt == self.attempt and work <= self.work:  # asked only now: if it is so still, none of them is newer
            for break_ in breakers:
                break_()

    def renew(self, timeout: timedelta) -> None:
        """Form all groups under the number of the next attempt; all ranks call it together."""
        self.attempt += 1
        for group in self._groups:
            group.renew(self.attempt, timeout)
        self._break_in_work()  # a rank that was through with this before may have broken off already


def register() -> None:
    """Make torch know the backends; `init_process_group` and `new_group` take their names then."""
    if not hasattr(dist.Backend, GLOO.upper()):
        dist.Backend.register_backend(GLOO, Renewable, devices=["cpu"])
        dist.Backend.register_backend(NCCL, RenewableNccl, devices=["cuda"])
