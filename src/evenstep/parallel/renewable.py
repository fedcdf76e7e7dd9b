"""Process groups that can be closed and reconnected, each around an inner group of torch."""

from collections.abc import Callable, Sequence
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
from evenstep.parallel.membership import wait_until

GLOO, NCCL = "renewable_gloo", "renewable_nccl"  # names of backends for torch
_UNUSED_TAG = 2**30  # of a message that nobody sends
_LOOK_S = 0.001
_COLLECTIVES = (
    "_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced all_to_all_single allgather "
    "allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier "
    "broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter reduce_scatter_single "
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send"
)


class Renewable(ProcessGroup):
    """A gloo group that can be closed and reconnected; its ranks find each other through `store` in each epoch."""

    _backend_name = GLOO
    _kind: Any = ProcessGroup.BackendType.GLOO
    _device_type = "cpu"

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        cast("Any", super()).__init__(rank, ranks)  # the way for groups that are written in Python
        self._store, self._rank, self._ranks, self._timeout = store, rank, ranks, timeout
        self.renew(0, timeout)

    def renew(self, epoch: int, timeout: timedelta) -> None:
        """Form the group of this epoch; all its ranks call it together."""
        store = PrefixStore(f"epoch {epoch}", self._store)
        store.add("came", 1)
        timeout_s = timeout.total_seconds()
        if not wait_until(lambda: store.add("came", 0) >= self._ranks, timeout_s):
            raise RuntimeError(f"{store.add('came', 0)} of {self._ranks} ranks came to it.")
        self._backend: Any = self._connected(store, timeout)
        self.inner: Any = group_around(self._backend, self._kind, self._device_type, store, self._rank, self._ranks)

    def _connected(self, store: Store, timeout: timedelta) -> Any:
        backend = ProcessGroupGloo(store, self._rank, self._ranks, timeout=timeout)
        set_timeout(backend, self._timeout)
        return backend

    def begin_work(self) -> None:
        """Let collectives started so far end, even if the connections are closed later."""

    def breaker(self) -> Callable[[], None]:
        """Function that closes the connections of now, whose collectives then raise; any thread may call it."""
        return partial(self._break, self._backend)

    def _break(self, backend: Any) -> None:
        if backend is None:  # shut down
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
        return self._backend_name


@final
class RenewableNccl(Renewable):
    """The same for tensors on CUDA devices; so far it has been run by one rank alone, not by several."""

    _backend_name = NCCL
    _kind = ProcessGroup.BackendType.NCCL
    _device_type = "cuda"
    _begun: torch.cuda.Event | None = None

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
            sleep(_LOOK_S)
        backend.abort()


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
    """All groups of this process by backend and ranks, closed and reconnected together."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        if not hasattr(dist.Backend, GLOO.upper()):
            dist.Backend.register_backend(GLOO, Renewable, devices=["cpu"])
            dist.Backend.register_backend(NCCL, RenewableNccl, devices=["cuda"])
        self._store, self._rank, self._ranks, self._timeout = store, rank, ranks, timeout
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}

    def get(self, backend: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of some ranks, connected at the first call; members only call it. The first has all ranks."""
        key = backend, tuple(ranks)
        if not self._groups:
            dist.init_process_group(
                backend, store=self._store, rank=self._rank, world_size=self._ranks, timeout=self._timeout
            )
            self._groups[key] = dist.group.WORLD
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                list(ranks), backend=backend, timeout=self._timeout, use_local_synchronization=True
            )
        return self._groups[key]

    def begin_work(self) -> None:
        for group in self._groups.values():
            group.begin_work()

    def breaker(self) -> Callable[[], None]:
        """Function that closes all connections of now; any thread may call it."""
        breakers = [group.breaker() for group in [*self._groups.values()]]

        def break_() -> None:
            for each in breakers:
                each()

        return break_

    def renew(self, epoch: int, timeout: timedelta) -> None:
        """Form all groups under this epoch's number; all ranks call it together."""
        for key in sorted(self._groups):  # in one order on all ranks, so that none waits in a circle
            self._groups[key].renew(epoch, timeout)
