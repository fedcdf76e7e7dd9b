"""Saves checkpoints one after the other while training goes on.

Each rank writes in a thread of its own; `poll` and `wait`, which all ranks call, exchange the results.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, final
from zlib import crc32

import torch
from torch import Tensor

from evenstep.checkpoint.mirror import Mirror
from evenstep.checkpoint.ranks import ALONE, TALK_EVERY_S, RankGroup, in_background, together
from evenstep.checkpoint.retention import retain
from evenstep.checkpoint.state import flat_state, local_of
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

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Take memory for copies of such tensors; if there is none, `copy` tries again."""
        try:
            self._reserve([*tensors])
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def copy(self, tensors: Mapping[T, Tensor]) -> tuple[dict[T, Tensor], Callable[[], None]]:
        """Contiguous copies, valid until the next call, and a function that waits for them.

        Args:
            tensors: on the CPU and at most one accelerator.
        """
        device = self._reserve([*tensors.values()])
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

    def _reserve(self, tensors: list[Tensor]) -> torch.device | None:
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if num_bytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device is not None)
            self._buffer = buffer.zero_()  # touches every page now
        return device


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT_BYTES


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Tensors by name, equal on all ranks with an equal `place`."""

    place: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    def sums(self) -> Tensor:
        """Sum of the bytes of each tensor; on an accelerator it is only enqueued."""
        sums = [byte_sum(one) for one in self.tensors.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def check(
        self, group: RankGroup, update: int, sums: list[int], checksums: list[tuple[tuple[int, ...], int]]
    ) -> None:
        """Raise ReplicaError on all ranks if any differs from another of its place.

        Args:
            sums: of this rank.
            checksums: of all ranks, each with its place.
        """
        firsts: dict[tuple[int, ...], int] = {}
        different = [rank for rank, (place, one) in enumerate(checksums) if one != firsts.setdefault(place, one)]
        if not different:
            return
        everybody = group.gather((self.place, dict(zip(self.tensors, sums, strict=True))))
        rank = different[0]
        place, theirs = everybody[rank]
        first = next(number for number, (other, _) in enumerate(everybody) if other == place)
        name = next(name for name in theirs if theirs[name] != everybody[first][1].get(name))
        raise ReplicaError(
            f"after update {update} rank {rank} differs from rank {first}, first in parameter `{name}`, so no "
            f"checkpoint was published: a hook or a task has changed it on one rank only, or memory is faulty. "
            f"Find the cause, and resume from the last checkpoint.",
            field=name,
        )


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


@final
@dataclass(slots=True)
class _PendingSave:
    """A save in flight.

    Args:
        steps: generator of this rank's jobs; it is sent the results of all ranks.
        job: the job in hand.
    """

    write: CheckpointWrite
    steps: "Generator[Callable[[], Any], list[Any]]" = field(init=False)
    job: "Future[Any]" = field(init=False)
    is_written: bool = False
    path: Path | None = None
    error: Exception | None = None

    def done(self, within_s: float = 0.0) -> bool:
        return not wait([self.job], within_s).not_done

    def finish(self, result: Any) -> None:
        """Do all jobs after that with `result`, without other ranks."""
        with suppress(StopIteration):
            while True:
                result = self.steps.send([result])()

    def result(self, error: Exception | None = None) -> SaveResult:
        if error is not None and self.path is None:
            self.write.abandon(error)
        return SaveResult(update=self.write.update, path=self.path, error=error or self.error)


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
        self._pending: _PendingSave | None = None

    def prepare(self, state: Mapping[str, object]) -> None:
        """Take memory for copies; raises CheckpointError for a state that cannot be saved."""
        flat = flat_state(state, alone=self._group.ranks == 1)
        if self._staging is not None and (self._group.rank == 0 or flat.sharded):
            whole = [tensor for each in flat.whole.values() for tensor in each.values()]
            self._staging.prepare([*whole, *map(local_of, flat.sharded.values())])

    def begin(
        self,
        update: int,
        state: Mapping[str, object],
        *,
        protect: Collection[str] = (),
        resumed_from: str | None = None,
        replica: Replica | None = None,
    ) -> str:
        """Begin a save; no other may be in flight.

        Args:
            update: number of committed updates in the state.
            state: as for `write_checkpoint`; if `asynchronous`, it may change as soon as this returns.
            protect: names of checkpoints that must not be deleted.
            resumed_from: as for `write_checkpoint`.
            replica: tensors that must be equal on ranks of the same place when the checkpoint is published.

        Returns:
            Why a rank has no memory for a copy of the state, so that all must `wait`; else "".
        """
        assert self._pending is None, "wait for the save before"
        save = CheckpointWrite(self._folder, update, state, group=self._group, resumed_from=resumed_from)
        compared = replica if self._group.ranks > 1 else None
        sums = None if compared is None else compared.sums()
        ready, no_memory = self._copy_state(save)

        pending = _PendingSave(save)
        pending.steps = self._steps(pending, ready, protect, compared, sums)
        first = next(pending.steps)
        alone = self._group.ranks == 1
        pending.job = in_background((lambda: pending.finish(first())) if alone else first)
        self._pending = pending
        return next((f"{why}, on rank {rank}" for rank, why in enumerate(no_memory) if why), "")

    def _steps(
        self,
        pending: _PendingSave,
        ready: Callable[[], None],
        protect: Collection[str],
        replica: Replica | None,
        sums: Tensor | None,
    ) -> Generator[Callable[[], Any], list[Any]]:
        save = pending.write
        own: list[int] = []

        def write() -> tuple[Any, Any]:
            ready()
            if replica is not None and sums is not None:
                own.extend(sums.tolist())
                return save.write(), (replica.place, crc32(repr(own).encode()))
            return save.write(), None

        def publish() -> tuple[Path, Exception | None]:
            path = save.publish(files for files, _ in written)
            if self._group.rank == 0:
                try:
                    retain(self._folder, protect=protect, **self._keep)
                    if self._mirror is not None:
                        self._mirror.remove(path.name)  # a copy of the same update is of another past
                except CheckpointError as error:
                    return path, error
            return path, None

        def publish_copy(mirror: Mirror) -> None:
            if self._group.rank == 0:
                mirror.publish(save.target)
                mirror.retain(protect=protect, **self._keep)

        written = yield write
        if replica is not None and len(written) == self._group.ranks:
            replica.check(self._group, save.update, own, [checksum for _, checksum in written])
        pending.is_written = True
        published = yield publish
        pending.path, pending.error = published[0]
        if self._mirror is not None:
            mirror = self._mirror
            yield lambda: mirror.upload(save.target, save.written)
            yield lambda: publish_copy(mirror)

    def _copy_state(self, save: CheckpointWrite) -> tuple[Callable[[], None], list[str]]:
        if self._staging is None:
            return lambda: None, []
        tensors = {(file, name): one for file, each in save.tensors.items() for name, one in each.items()}
        try:
            copies, ready = self._staging.copy(tensors)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return lambda: None, self._group.gather(clause(error))
        for (file, name), copy in copies.items():
            save.tensors[file][name] = copy
        return ready, self._group.gather("")

    def poll(self) -> SaveResult | None:
        """Continue the save in flight, without waiting; gives its result, if it has ended."""
        pending = self._pending
        if pending is None or not all(self._group.gather(pending.done())):
            return None
        return self._go_on(pending)

    def wait(self) -> SaveResult | None:
        """Wait until no save is in flight; gives its result, if there was one."""
        result = None
        while self._pending is not None:
            self._wait_for(self._pending)
            result = self._go_on(self._pending)
        return result

    def end_alone(self) -> SaveResult | None:
        """End the save in flight without the other ranks, which may be gone; gives its result."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        try:
            if pending.write.is_shared and not pending.is_written:
                wait([pending.job], self._timeout_s)  # it writes to the folder of the next save of the same update
                raise CheckpointError("other ranks may not have written their part, so the save was given up.")
            pending.finish(self._result_of(pending.job, self._timeout_s))
            return pending.result()
        except Exception as error:  # noqa: BLE001 - given to the caller
            return pending.result(error)

    def _wait_for(self, pending: _PendingSave) -> None:
        deadline = monotonic() + self._timeout_s
        step_s = min(TALK_EVERY_S, self._timeout_s)
        while True:  # ranks with little to write talk all the while, so that none is taken for lost
            everybody = self._group.gather((pending.done(within_s=step_s), monotonic() > deadline))
            if all(done for done, _ in everybody) or any(is_late for _, is_late in everybody):
                return

    def _go_on(self, pending: _PendingSave) -> SaveResult | None:
        try:
            results = together(self._group, lambda: self._result_of(pending.job, 0))
            pending.job = in_background(pending.steps.send(results))
        except StopIteration:
            result = pending.result()
        except Exception as error:  # noqa: BLE001 - given to the caller
            result = pending.result(error)
        else:
            return None
        self._pending = None
        return result

    def _result_of(self, job: "Future[T]", within_s: float) -> T:
        try:
            return job.result(within_s)
        except TimeoutError as error:
            raise CheckpointError(
                f"a checkpoint was not written within {self._timeout_s:g} s, so it was given up; look at the disk."
            ) from error
