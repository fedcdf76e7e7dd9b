"""Saves checkpoints one after the other while training goes on.

Each rank writes in a thread of its own; `poll` and `wait`, which all ranks call, exchange the results.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, TypeVar, final
from zlib import crc32

import torch
from torch import Tensor

from evenstep.checkpoint.mirror import Mirror
from evenstep.checkpoint.ranks import ALONE, TALK_EVERY_S, RankGroup, in_background, together
from evenstep.checkpoint.retention import retain
from evenstep.checkpoint.shard import is_sharded, local_of
from evenstep.checkpoint.state import flat_state
from evenstep.checkpoint.write import CheckpointWrite
from evenstep.errors import CheckpointError, ReplicaError, clause
from evenstep.oom import is_out_of_memory
from evenstep.tensors import byte_sum

T = TypeVar("T")
_ALIGNMENT_BYTES = 64


@final
class Staging:
    """Buffer for copies of a state, kept from save to save, as fresh memory costs ten times the copy.

    With an accelerator the memory is pinned and copies are only enqueued; the thread that writes waits for them.

    >>> copies, ready = Staging().copy({"bias": torch.ones(2)})
    >>> ready()
    >>> copies["bias"]
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, tensors: Iterable[Tensor]) -> torch.device | None:
        """Take memory for copies of such tensors; gives the accelerator that some are on."""
        tensors = list(tensors)
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if num_bytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device is not None)
            self._buffer = buffer.zero_()  # touches every page now
        return device

    def copy(self, tensors: Mapping[T, Tensor]) -> tuple[dict[T, Tensor], Callable[[], None]]:
        """Contiguous copies, valid until the next call, and a function that waits for them; of one accelerator."""
        device = self.reserve(tensors.values())
        copies: dict[T, Tensor] = {}
        begin = 0
        with torch.no_grad():
            for name, tensor in tensors.items():  # a foreach copy is no faster
                view = self._buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name] = view.copy_(tensor, non_blocking=True)
                begin += _aligned(tensor.nbytes)
        if device is None:
            return copies, lambda: None
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))  # the tensors' device need not be the current one
        return copies, event.synchronize


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT_BYTES


class Replica(NamedTuple):
    """Tensors by name, equal on all ranks with an equal `place`."""

    place: tuple[int, ...]
    tensors: Mapping[str, Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Result of a save.

    Args:
        update: number of committed updates in the state.
        path: the checkpoint, or None.
        error: why there is no checkpoint, or why old ones could not be deleted, or why there is no copy in the mirror.
    """

    update: int
    path: Path | None
    error: Exception | None


_Steps: TypeAlias = "Generator[Callable[[], Any], list[Any], SaveResult]"
"""Gives this rank's jobs, one after the other, and is sent the results of all ranks, or thrown the error of one."""


@final
class AsyncWriter:
    """Writer of the checkpoints of one run.

    Args:
        group: the ranks; all call every method alike.
        keep_last, keep_every_updates: as for `retain`.
        asynchronous: whether the state is copied first, so that it may change while it is written.
        mirror: copies of the checkpoints.
        timeout_s: longest duration of a save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: RankGroup = ALONE,
        keep_last: int | None = None,
        keep_every_updates: int | None = None,
        asynchronous: bool = True,
        mirror: Mirror | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._folder = folder
        self._mirror = mirror
        self._group = group
        self._timeout_s = timeout_s
        self._keep: dict[str, Any] = {"keep_last": keep_last, "keep_every_updates": keep_every_updates}
        self._staging = Staging() if asynchronous else None
        self._write: CheckpointWrite | None = None  # in flight
        self._steps: _Steps
        self._job: Future[Any]
        self._is_written = False

    def prepare(self, state: Mapping[str, object]) -> None:
        """Take memory for copies, if there is any; raises CheckpointError for a state that cannot be saved."""
        tensors = flat_state(state, alone=self._group.ranks == 1)[0].values()
        if self._staging is None or (self._group.rank and not any(map(is_sharded, tensors))):
            return
        try:
            self._staging.reserve(local_of(one) if is_sharded(one) else one for one in tensors)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def begin(
        self,
        update: int,
        state: Mapping[str, object],
        *,
        protect: Collection[str] = (),
        resumed_from: str | None = None,
        replica: Replica | None = None,
    ) -> str:
        """Begin a save; gives the reason why a rank has no memory for a copy, so that all must `wait`, else "".

        Args:
            update, state, resumed_from: as for `write_checkpoint`; the state may change as soon as this returns.
            protect: names of checkpoints that must not be deleted.
            replica: tensors that must be equal on ranks of the same place when the checkpoint is published.
        """
        assert self._write is None, "wait for the save before"
        write = CheckpointWrite(self._folder, update, state, group=self._group, resumed_from=resumed_from)
        compared = replica if self._group.ranks > 1 else None
        sums = None
        if compared is not None and compared.tensors:
            sums = torch.stack([byte_sum(one) for one in compared.tensors.values()])  # only enqueued
        ready, no_memory = self._copy_state(write)
        self._steps = self._steps_of(write, ready, protect, compared, sums)
        self._job = in_background(next(self._steps))
        self._is_written = False
        self._write = write
        return next((f"{why}, on rank {rank}" for rank, why in enumerate(no_memory) if why), "")

    def _copy_state(self, write: CheckpointWrite) -> tuple[Callable[[], None], list[str]]:
        if self._staging is None:
            return lambda: None, []
        tensors = {(file, name): one for file, each in write.tensors.items() for name, one in each.items()}
        try:
            copies, ready = self._staging.copy(tensors)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return lambda: None, self._group.gather(clause(error))
        for (file, name), copy in copies.items():
            write.tensors[file][name] = copy
        return ready, self._group.gather("")

    def _steps_of(
        self,
        write: CheckpointWrite,
        ready: Callable[[], None],
        protect: Collection[str],
        replica: Replica | None,
        sums: Tensor | None,
    ) -> _Steps:
        is_first, mirror = self._group.rank == 0, self._mirror
        own: dict[str, int] = {}

        def write_files() -> tuple[Any, Any]:
            ready()
            if replica is None:
                return write.write(), None
            if sums is not None:
                own.update(zip(replica.tensors, sums.tolist(), strict=True))
            return write.write(), (replica.place, crc32(repr(own).encode()))

        def publish() -> tuple[Path, Exception | None]:
            path = write.publish(files for files, _ in written)
            try:
                if is_first:
                    retain(self._folder, protect=protect, **self._keep)
                if is_first and mirror is not None:
                    mirror.remove(path.name)  # a copy of the same update is of another past
            except CheckpointError as error:
                return path, error
            return path, None

        def publish_copy() -> None:
            if mirror is not None and is_first:
                mirror.publish(write.target)
                mirror.retain(protect=protect, **self._keep)

        path, problem = None, None
        try:
            written = yield write_files
            if replica is not None and len(written) == self._group.ranks:
                checksums = [checksum for _, checksum in written]
                _check_equal(self._group, write.update, replica.place, own, checksums)
            path, problem = (yield publish)[0]
            if mirror is not None:
                yield lambda: mirror.upload(write.target, write.written)
                yield publish_copy
        except Exception as error:  # noqa: BLE001 - given to the caller
            problem = error
            if path is None:
                write.abandon(error)
        return SaveResult(update=write.update, path=path, error=problem)

    def poll(self) -> SaveResult | None:
        """Continue the save in flight, without waiting; gives its result, if it has ended."""
        if self._write is None or not all(self._group.gather(self._is_done())):
            return None
        return self._go_on()

    def wait(self) -> SaveResult | None:
        """Wait until no save is in flight; gives its result, if there was one."""
        result = None
        while self._write is not None:
            self._wait_for_job()
            result = self._go_on()
        return result

    def end_alone(self) -> SaveResult | None:
        """End the save in flight without the other ranks, which may be gone; gives its result."""
        group, self._group = self._group, ALONE
        try:
            return self.wait()
        finally:
            self._group = group

    def _is_done(self, within_s: float = 0.0) -> bool:
        return not wait([self._job], within_s).not_done

    def _wait_for_job(self) -> None:
        deadline = monotonic() + self._timeout_s
        step_s = min(TALK_EVERY_S, self._timeout_s)
        while True:  # ranks with little to write talk all the while, so that none is taken for lost
            everybody = self._group.gather((self._is_done(step_s), monotonic() > deadline))
            if all(done for done, _ in everybody) or any(is_late for _, is_late in everybody):
                return

    def _go_on(self) -> SaveResult | None:
        try:
            try:
                results = together(self._group, self._result)
            except Exception as error:  # noqa: BLE001 - the save ends with it
                job = self._steps.throw(error)
            else:
                job = self._steps.send(results)
        except StopIteration as end:
            self._write = None
            return end.value
        self._job = in_background(job)
        self._is_written = True
        return None

    def _result(self) -> Any:
        if self._group is ALONE and self._write is not None and self._write.is_shared and not self._is_written:
            raise CheckpointError("other ranks may not have written their part, so the save was given up.")
        try:
            return self._job.result(0)
        except TimeoutError as error:
            raise CheckpointError(
                f"a checkpoint was not written within {self._timeout_s:g} s, so it was given up; look at the disk."
            ) from error


def _check_equal(
    group: RankGroup,
    update: int,
    place: tuple[int, ...],
    own: Mapping[str, int],
    checksums: list[tuple[tuple[int, ...], int]],
) -> None:
    """Raise ReplicaError on all ranks if two ranks of one place have different tensors.

    Args:
        own: sums of this rank's tensors.
        checksums: of the sums of all ranks, each with its place.
    """
    firsts: dict[tuple[int, ...], int] = {}
    different = [rank for rank, (where, one) in enumerate(checksums) if one != firsts.setdefault(where, one)]
    if not different:
        return
    everybody = group.gather((place, own))
    rank = different[0]
    where, theirs = everybody[rank]
    first = next(number for number, (other, _) in enumerate(everybody) if other == where)
    name = next(name for name in theirs if theirs[name] != everybody[first][1].get(name))
    raise ReplicaError(
        f"after update {update} rank {rank} differs from rank {first}, first in `{name}`, so no checkpoint was "
        f"published: a hook or a task has changed it on one rank only, or memory is faulty. Find the cause, and resume "
        f"from the last checkpoint.",
        field=name,
    )
