"""The checkpoints of a run: when they begin and end, what hooks hear of it, and what a failure means.

    begin      copies the state, and lets training go on (or, if saves are not asynchronous, ends the save as well)
    poll       at each end of an update: a save that has ended is told; one that has failed is an incident
    finish     waits for what is in flight
    rescue     after an error: the same without other ranks, then the state as of the last committed update

What is saved is the trainer's; how it gets to the disk is `evenstep.checkpoint`'s.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, final

from evenstep.checkpoint import (
    Saved,
    Saver,
    clean_leftovers,
    discard_parts,
    join_parts,
    locked,
    newest_valid,
    step_name,
    trained_before,
    write_emergency,
    write_failure,
    write_part,
)
from evenstep.data import GlobalBatch
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.events import Bus, Incident, SaveBegin, SaveEnd
from evenstep.parallel import Group

_WORTH_TELLING_S = 1.0


@final
@dataclass(slots=True, kw_only=True)
class Saving:
    """Saves for a trainer.

    Args:
        folder: of the run; None keeps nothing.
        group: the ranks of the run.
        bus: told of saves.
        report: tells hooks and writers of an incident.
        keep: how many of the newest checkpoints to keep; None keeps all, 0 writes none.
        keep_every_updates: also keep those of every so many updates.
        asynchronous: whether training goes on while a checkpoint is written.
        saved_at: the update of the last published checkpoint, or -1.
        is_claimed: whether this run may write into the folder, whatever is in it: it goes on there.
    """

    folder: Path | None
    group: Group
    bus: Bus
    report: Callable[[Incident], None]
    keep: int | None
    keep_every_updates: int | None
    asynchronous: bool
    saved_at: int = -1
    is_claimed: bool = False
    _saver: Saver | None = None
    _span: AbstractContextManager[None] = field(default_factory=nullcontext[None])
    _path: Path | None = None
    _is_prepared: bool = False
    _depth: int = 0
    _taken_over: str = ""

    def __post_init__(self) -> None:
        if self.enabled and self.folder is not None:
            self._saver = Saver(
                self.folder / "checkpoints",
                group=self.group,
                keep_last=self.keep,
                keep_every_updates=self.keep_every_updates,
                asynchronous=self.asynchronous,
            )

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are written."""
        return self.folder is not None and self.keep != 0

    def newest(self) -> Path | None:
        """The newest valid checkpoint of the run folder, or None; those that were passed over are incidents.

        Raises:
            ArgumentError: there is no folder.
        """
        if self.folder is None:
            raise ArgumentError("`resume` must be a path, since this trainer has no `folder` to look into.")
        _, said = join_parts(self.folder)
        if said:
            self.report(Incident(kind="emergency", update=0, message=said, details={}))
        path, rejected = newest_valid(self.folder)
        for name, why in rejected:
            message = f"{name.name} was passed over: {why}"
            self.report(Incident(kind="checkpoint", update=0, message=message, details={}))
        return path

    def resumed(self, update: int, path: Path) -> None:
        """The run has gone on from `path`: that one need not be written again."""
        self.saved_at = update
        if self.folder is not None:
            self.is_claimed |= path.resolve().is_relative_to(self.folder.resolve())
        if self._saver is not None:
            self._saver.resumed_from = str(path)

    def path_of(self, update: int) -> Path:
        """Where the checkpoint after `update` is."""
        assert self.folder is not None, "asked only where there is one"
        return self.folder / "checkpoints" / step_name(update)

    def claim(self) -> None:
        """Make the folder this run's, before it writes anything there; all ranks call it together.

        Raises:
            ArgumentError: another run has trained in it, whose metrics and checkpoints would be lost or mixed up.
        """
        if self.folder is None or self.is_claimed:
            return
        if not self.group.can_change:  # where a process that comes back finds what its run has written
            self.group.first_rank_does(self._check_unused)
        self.is_claimed = True

    def _check_unused(self) -> None:
        assert self.folder is not None, "looked at before"
        left = trained_before(self.folder)
        if left:
            raise ArgumentError(
                f"the folder `{self.folder}` is another run's, which has left {left}, and nothing in it was touched. "
                f"To go on with that run: `trainer.resume()` before `trainer.train()`; to keep it and train another: "
                f"give another `folder`; to start over: delete the folder first."
            )

    @contextmanager
    def holding_folder(self) -> Generator[None]:
        """Keep other runs out of the run folder; within another such `with`, nothing more.

        Raises:
            CheckpointError: another run is in it.
        """
        self._depth += 1
        try:
            mine = self._depth == 1 and self.folder is not None and self.group.rank == 0
            with locked(self.folder) if mine and self.folder is not None else nullcontext("") as taken:
                self._taken_over = taken
                yield
        finally:
            self._depth -= 1

    def clean(self, update: int) -> None:
        """Delete what killed processes have left half written, and say so."""
        if self.folder is None or self.group.rank:
            return
        taken = [self._taken_over] if self._taken_over else []
        for message in [*taken, *clean_leftovers(self.folder / "checkpoints"), *discard_parts(self.folder)]:
            self.report(Incident(kind="leftover", update=update, message=message, details={}))

    def begin(self, update: int, state: Callable[[], Mapping[str, object]], *, must: bool = False) -> None:
        """Begin to save; training must wait until this returns.

        Args:
            update: number of committed updates.
            state: gives the state.
            must: whether a disk that fails is an error, also where saves are asynchronous.

        Raises:
            ArgumentError: nothing is to be kept.
            CheckpointError: a state that cannot be saved; where it must be, or saves are not asynchronous, any failure.
        """
        saver = self._require()
        self.claim()
        self._wait_for_the_one_before(update)
        self._span = self.bus.span(
            "save", lambda: SaveBegin(update=update), lambda error: SaveEnd(update=update, path=self._path)
        )
        self._path = None
        self._span.__enter__()
        try:
            saver.begin(update, state(), protect=self.bus.kept_checkpoints())
        except BaseException as error:
            if isinstance(error, CheckpointError) and self._is_of_a_disk(error) and self.asynchronous and not must:
                self._ended(Saved(update=update, path=None, error=error, seconds=0.0))
                return
            self._span.__exit__(type(error), error, error.__traceback__)
            raise
        if not self.asynchronous:
            self.finish()

    def _is_of_a_disk(self, error: CheckpointError) -> bool:
        # on another rank than the one whose disk it is, it comes without a cause
        return any(self.group.gather(isinstance(error.__cause__, OSError)))

    def _wait_for_the_one_before(self, update: int) -> None:
        saver = self._require()
        if not saver.in_flight:
            return
        began = perf_counter()
        before = saver.wait()
        assert before is not None, "one was in flight"
        waited_s = perf_counter() - began
        self._ended(before)
        if waited_s >= _WORTH_TELLING_S:
            message = (
                f"training waited {waited_s:.1f} s to save update {update}, because the checkpoint of update "
                f"{before.update} was still being written; save less often, or to a faster disk."
            )
            self.report(Incident(kind="slow_save", update=update, message=message, details={"waited_s": waited_s}))

    def poll(self, update: int, state: Callable[[], Mapping[str, object]]) -> None:
        """Take note of a save that has ended; at the first update, take the memory that copies will need."""
        saver = self._saver
        if saver is None:
            return
        if not self._is_prepared and update > 0:
            self._is_prepared = True
            saver.prepare(state())
        if saver.in_flight:
            saved = saver.poll()
            if saved is not None:
                self._ended(saved)

    def settle(self) -> None:
        """Wait for what is in flight; a failure is an incident."""
        saved = None if self._saver is None else self._saver.wait()
        if saved is not None:
            self._ended(saved)

    def finish(self) -> Path | None:
        """Wait for what is in flight; gives its folder, or None if there is nothing.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        saved = None if self._saver is None else self._saver.wait()
        if saved is None:
            return None
        self._ended(saved, raises=True)
        return saved.path

    def _ended(self, saved: Saved, *, raises: bool = False) -> None:
        error = saved.error
        self._path = saved.path
        if saved.path is not None:
            self.saved_at = saved.update
        if raises and saved.path is None and error is not None:
            self._span.__exit__(type(error), error, error.__traceback__)
            raise error
        self._span.__exit__(None, None, None)
        if error is None:
            return
        if raises:
            raise error
        what = f"{error} Training goes on; the next save tries again." if saved.path is None else str(error)
        self.report(Incident(kind="save_failed", update=saved.update, message=what, details={}))

    def settle_alone(self) -> None:
        """End what is in flight without the other ranks, which may be gone; a failure is an incident."""
        in_flight = None if self._saver is None else self._saver.end_alone()
        if in_flight is not None:
            self._ended(in_flight)

    def rescue(
        self,
        error: BaseException,
        update: int,
        state: Callable[[], Mapping[str, object]] | None,
        failure: dict[str, Any],
        *,
        part: tuple[int, int],
    ) -> None:
        """After `error` has ended training: save what can be saved without the other ranks, and say so.

        Args:
            error: that ended it.
            update: number of committed updates.
            state: gives what this rank holds of the state as of that update; None where it is not known to be that.
            failure: what is known of the update that failed; empty if none was under way.
            part: which part of the state this rank holds, and of how many.
        """
        if self._saver is None or self.folder is None:
            return
        self.settle_alone()
        if not isinstance(error, Exception) or isinstance(error, CheckpointError) or update == 0:
            return  # somebody is in a hurry, the disk is the trouble, or nothing was reached
        if update > self.saved_at and state is None:
            self._tell(update, "the error came while parameters were changed: the newest checkpoint stands.")
        elif update > self.saved_at and state is not None:
            self._save_alone(self.folder, update, state(), part, self._saver.resumed_from)
        if failure:
            path = self._write_failure(self.folder, failure)
            self._tell(update, f"what update {update + 1} failed with is kept: `evenstep replay {path}` runs it again.")

    def _save_alone(
        self, run: Path, update: int, state: Mapping[str, object], part: tuple[int, int], resumed_from: str | None
    ) -> None:
        place, places = part
        if places == 1:
            path = write_emergency(run / "checkpoints", update, state, resumed_from=resumed_from)
            message = f"the state after update {update} is saved in {path}."
        else:
            path = write_part(run, update, state, place=place, places=places, resumed_from=resumed_from)
            message = (
                f"part {place + 1} of {places} of the state after update {update} is saved in {path}; if the other "
                f"ranks save theirs, `resume` goes on from there."
            )
        if path is not None:
            self.saved_at = update
            self._tell(update, message)

    def _write_failure(self, folder: Path, failure: dict[str, Any]) -> Path:
        try:
            return write_failure(folder, failure["update"], self.group.rank, failure)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            # batches may hold anything; where they are has to do then
            return write_failure(folder, failure["update"], self.group.rank, {**failure, "microbatches": None})

    def _tell(self, update: int, message: str) -> None:
        self.report(Incident(kind="emergency", update=update, message=message, details={}))

    def _require(self) -> Saver:
        if self._saver is not None:
            return self._saver
        if self.folder is None:
            raise ArgumentError("this trainer keeps nothing: give it a `folder` to save checkpoints in.")
        raise ArgumentError("a checkpoint was asked for, but `checkpoint.keep_last` is 0; set how many to keep.")


def describe_failure(
    error: BaseException, under_way: tuple[GlobalBatch, int] | None, *, rank: int, ranks: int
) -> dict[str, Any]:
    """What is known of an update that failed, as a state; see `evenstep.train.replay` for its use.

    Args:
        error: what it failed with.
        under_way: the batch of the update and its number; None, where there was none, gives an empty state.
        rank, ranks: where.
    """
    if under_way is None:
        return {}
    batch, update = under_way
    return {
        "update": update,
        "rank": rank,
        "ranks": ranks,
        "error": f"{type(error).__name__}: {error}",
        "position": {"epoch": batch.position.epoch, "batch": batch.position.batch},
        "following": {"epoch": batch.following.epoch, "batch": batch.following.batch},
        "num_microbatches": batch.num_microbatches,
        "num_samples": batch.num_samples,
        "ends_epoch": batch.ends_epoch,
        "microbatches": [
            {
                "index": one.index,
                "num_samples": one.num_samples,
                "counted": one.counted,
                "task": one.task,
                "data": one.data,
            }
            for one in batch.microbatches
        ],
        "parts": [[one.task, one.num_microbatches, one.num_samples] for one in batch.parts],
    }
