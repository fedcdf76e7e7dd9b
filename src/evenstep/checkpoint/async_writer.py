"""Saves checkpoints one after the other, while training goes on.

    begin     copies the state; that is all that training waits for, unless the save before is not done yet
    poll      at ends of updates: takes note of what has come to an end, on all ranks together
    wait      until nothing is in flight

Each rank writes in a thread of its own. When all have written, the first publishes; when that is done, all know. Where
there is a mirror, each then copies there what it has written, and the first publishes that as well. No thread talks to
other ranks: that is left to `poll` and `wait`, which all ranks call alike. When to save, what, and what a failure means
for the run is not decided here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TypeVar, final

from evenstep.checkpoint.flat_state import FlatState
from evenstep.checkpoint.mirror import Mirror
from evenstep.checkpoint.ranks import ALONE, TALK_EVERY_S, RankGroup, in_background, together
from evenstep.checkpoint.retention import retain
from evenstep.checkpoint.staging import Staging
from evenstep.checkpoint.writer import CheckpointWrite, Written
from evenstep.errors import CheckpointError, clause
from evenstep.oom import is_out_of_memory

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How a save ended.

    Args:
        path: of the checkpoint; None if there is none.
        error: why there is none, or why old ones could not be deleted, or it could not be copied to the mirror.
        seconds: from its beginning to its end.
    """

    update: int
    path: Path | None
    error: Exception | None
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class _PendingSave:
    """A save that has begun, as a chain of jobs.

    Args:
        then: what all do when all are done with `job`, given everybody's results, by rank.
        job: what this rank does now.
        is_being_written: whether ranks still write their files.
        saved: how it ended, once it was published.
    """

    write: CheckpointWrite
    began: float
    protect: Collection[str]
    then: "list[Callable[[list[Any]], Any]]"
    job: "Future[Any]" = field(default_factory=Future[Any])
    is_being_written: bool = True
    saved: SaveResult | None = None

    def done(self, within_s: float = 0.0) -> bool:
        return not wait([self.job], within_s).not_done

    def result(self, path: Path | None, error: Exception | None) -> SaveResult:
        return SaveResult(update=self.write.update, path=path, error=error, seconds=perf_counter() - self.began)

    def failed(self, error: Exception) -> SaveResult:
        if self.saved is None:
            self.write.abandon(error)
        return self.result(self.saved and self.saved.path, error)


@final
class AsyncWriter:
    """The checkpoints of one run.

    Args:
        group: the ranks; all call every method alike.
        keep_last, keep_every_updates: as for `retain`.
        asynchronous: whether the state is copied first, so that it may change while it is written.
        mirror: where checkpoints are copied to.
        timeout_s: the longest wait for a save to come to an end.
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
        self.folder, self._mirror = folder, mirror
        self._group, self._timeout_s = group, timeout_s
        self._keep_last, self._keep_every = keep_last, keep_every_updates
        self._staging = Staging() if asynchronous else None
        self._pending: _PendingSave | None = None

    def prepare(self, state: Mapping[str, object]) -> None:
        """Take the memory that copies of such a state need, in the background, so that the first save is as short.

        Raises:
            CheckpointError: a state that cannot be saved, which is found here also where there are no copies.
        """
        flat = FlatState.of(state, alone=self._group.ranks == 1)
        if self._staging is not None and (self._group.rank == 0 or flat.sharded):
            self._staging.prepare(flat.held())

    def begin(
        self,
        update: int,
        state: Mapping[str, object],
        *,
        protect: Collection[str] = (),
        resumed_from: str | None = None,
    ) -> str:
        """Begin to save; nothing may be in flight.

        Returns:
            Where it is asynchronous, why there is no copy of the state on some rank, so that all must `wait`; else "".

        Args:
            update: number of committed updates in the state.
            state: as for `write_checkpoint`; where it is copied, it may change as soon as this has returned.
            protect: names of checkpoints that must not be deleted to make room.
            resumed_from: as for `write_checkpoint`.

        Raises:
            CheckpointError: a state that cannot be saved.
        """
        assert self._pending is None, "wait for the save before"
        began = perf_counter()
        save = CheckpointWrite(self.folder, update, state, group=self._group, resumed_from=resumed_from)
        ready, no_memory = self._copied(save)

        def write() -> Written:
            if ready is not None:
                ready()
            return save.write()

        after: list[Callable[[list[Any]], Any]] = [lambda results: self._publish(pending, results)]
        if (mirror := self._mirror) is not None:
            after.append(lambda results: self._copy(pending, mirror, results))
            after.append(lambda results: self._publish_copy(pending, mirror))
        alone = self._group.ranks == 1
        pending = self._pending = _PendingSave(write=save, began=began, protect=protect, then=[] if alone else after)
        pending.job = in_background((lambda: _chained(write(), after)) if alone else write)
        return next((f"{why}, on rank {rank}" for rank, why in enumerate(no_memory) if why), "")

    def _copied(self, save: CheckpointWrite) -> tuple[Callable[[], None] | None, list[str]]:
        if self._staging is None:
            return None, []
        ready, why = None, ""
        try:
            ready = self._staging.copy(save.files())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = clause(error)
        return ready, self._group.gather(why)

    def poll(self) -> SaveResult | None:
        """Go on with what is in flight, without waiting; gives how it ended, once it has."""
        pending = self._pending
        if pending is None or not all(self._group.gather(pending.done())):
            return None
        return self._go_on(pending)

    def wait(self) -> SaveResult | None:
        """Wait until nothing is in flight; gives how it ended, or None if nothing was."""
        result = None
        while self._pending is not None:
            self._wait_for(self._pending)
            result = self._go_on(self._pending)
        return result

    def end_alone(self) -> SaveResult | None:
        """Bring what is in flight to an end without the other ranks, which may be gone; gives how it ended."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            if pending.is_being_written and pending.write.is_shared:
                wait([pending.job], self._timeout_s)  # which writes where the next save of the same update will
                raise CheckpointError("other ranks may not have written their part; it is given up.")
            return _chained(self._taken(pending.job), pending.then)
        except Exception as error:  # noqa: BLE001 - told to the caller
            return pending.failed(error)

    def _wait_for(self, pending: _PendingSave) -> None:
        deadline = monotonic() + self._timeout_s
        step_s = min(TALK_EVERY_S, self._timeout_s)
        # ranks that have little to write talk to the others all the while, so that nobody takes them for lost
        while True:
            told = self._group.gather((pending.done(within_s=step_s), monotonic() > deadline))
            if all(done for done, _ in told) or any(over for _, over in told):
                return

    def _go_on(self, pending: _PendingSave) -> SaveResult | None:
        try:
            results = together(self._group, lambda: self._taken(pending.job, within_s=0))
            if pending.then:
                following = pending.then.pop(0)
                pending.is_being_written, pending.job = False, in_background(lambda: following(results))
                return None
            result: SaveResult = results[0]
        except Exception as error:  # noqa: BLE001 - told to whoever asked for the save
            result = pending.failed(error)
        self._pending = None
        return result

    def _publish(self, pending: _PendingSave, results: list[Written]) -> SaveResult:
        path, error = pending.write.publish(results), None
        if self._group.rank == 0:
            try:
                retain(
                    self.folder,
                    keep_last=self._keep_last,
                    keep_every_updates=self._keep_every,
                    protect=pending.protect,
                )
                if self._mirror is not None:
                    self._mirror.remove(path.name)  # that of a past that did not happen
            except CheckpointError as raised:
                error = raised
        return pending.result(path, error)

    def _copy(self, pending: _PendingSave, mirror: Mirror, results: list[SaveResult]) -> SaveResult:
        pending.saved = results[0]
        mirror.upload(pending.write.target, pending.write.written)
        return pending.saved

    def _publish_copy(self, pending: _PendingSave, mirror: Mirror) -> SaveResult:
        saved = pending.saved
        assert saved is not None, "published before it is copied"
        if self._group.rank == 0:
            mirror.publish(pending.write.target)
            mirror.retain(keep_last=self._keep_last, keep_every_updates=self._keep_every, protect=pending.protect)
        return pending.result(saved.path, saved.error)

    def _taken(self, job: "Future[T]", *, within_s: float | None = None) -> T:
        try:
            return job.result(self._timeout_s if within_s is None else within_s)
        except TimeoutError as error:
            raise CheckpointError(
                f"a checkpoint was not written within {self._timeout_s:g} s, so it is given up; look at the disk."
            ) from error


def _chained(result: Any, jobs: "Sequence[Callable[[list[Any]], Any]]") -> Any:
    for job in jobs:
        result = job([result])
    return result
