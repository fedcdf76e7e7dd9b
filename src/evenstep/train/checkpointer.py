"""Saves the state of a run as checkpoints, and resumes from them."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from evenstep.checkpoint import AsyncWriter, SaveResult, UnreadableError
from evenstep.errors import ArgumentError, CheckpointError, ReplicaError
from evenstep.events import SaveEvent
from evenstep.options import Checkpointing, Reset
from evenstep.train.reporter import Reporter
from evenstep.train.run_state import RunState
from evenstep.train.state import Tree
from evenstep.train.state.run_folder import RunFolder


@final
@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores the state of a run; all ranks call each method together, except `settle_alone`.

    Args:
        saved_at: update of the last published checkpoint, or -1.
        is_prepared: True once the memory for copies was taken.
        resumed_from: the checkpoint that the run was resumed from.
        is_named: True if it was resumed from a named state, so that the folder may have later checkpoints.
    """

    state: RunState
    folder: RunFolder
    options: Checkpointing
    reporter: Reporter
    saved_at: int = -1
    is_prepared: bool = False
    resumed_from: str | None = None
    is_named: bool = False
    _writer: AsyncWriter | None = None
    _span: AbstractContextManager[None] = field(default_factory=nullcontext[None])
    _path: Path | None = None
    _last: tuple[int, int] | None = None  # update of the last fault, and of the checkpoint that the run went back to

    def __post_init__(self) -> None:
        if self.enabled:
            self._writer = AsyncWriter(
                self.folder.checkpoints,
                group=self.folder.group,
                keep_last=self.options.keep_last,
                keep_every_updates=self.options.keep_every_updates,
                asynchronous=self.options.asynchronous,
                mirror=self.folder.mirror,
            )

    @property
    def enabled(self) -> bool:
        return self.folder.path is not None and self.options.keep_last != 0

    @property
    def _update(self) -> int:
        return self.state.engine.progress.update

    def begin(self, *, must: bool = False) -> None:
        """Begin to save the state as it is; training waits until this returns. Metrics must have been written.

        Args:
            must: whether a failing disk is an error, also in the background.
        """
        writer, update, bus = self._require(), self._update, self.state.engine.bus
        self.folder.claim()
        self._ended(writer.wait())
        self._path = None

        def event(error: BaseException | None = None) -> SaveEvent:
            return SaveEvent(update=update, path=self._path)

        self._span = bus.span("save", event, event)
        self._span.__enter__()
        try:
            self.state.engine.parts.core.share_unseen_buffers()
            no_memory = writer.begin(
                update,
                self.state.state_dict(whole=False),
                protect=bus.kept_checkpoints(),
                resumed_from=self.resumed_from,
                replica=self.state.replica(),
            )
        except BaseException as error:
            tolerated = self.options.asynchronous and not must
            if tolerated and isinstance(error, CheckpointError) and self._is_of_a_disk(error):
                self._ended(SaveResult(update=update, path=None, error=error))
                return
            self._span.__exit__(type(error), error, error.__traceback__)
            raise
        if not self.options.asynchronous:
            self._ended(writer.wait(), raises=True)
        elif no_memory:
            message = (
                f"training waits for the save of update {update}: no memory for a copy of the state ({no_memory})."
            )
            self.reporter.say("slow_save", update, message)
            self._ended(writer.wait(), raises=must)

    def poll(self) -> None:
        """Take note of a save that has ended; after the first update, find out whether the state can be saved."""
        if self._writer is None:
            return
        if not self.is_prepared and self._update > 0:
            self.is_prepared = True
            self._writer.prepare(self.state.state_dict(whole=False))
        self._ended(self._writer.poll())

    def save(self) -> Path:
        """Write a checkpoint of the state as it is; gives its folder once it is published."""
        self.begin(must=True)
        self._ended(self._require().wait(), raises=True)
        return self.folder.checkpoint_of(self._update)

    def settle(self) -> None:
        """Wait until no save is in flight."""
        if self._writer is not None:
            self._ended(self._writer.wait())

    def settle_alone(self) -> bool:
        """End the save in flight without other ranks; True if it gave no checkpoint."""
        result = None if self._writer is None else self._writer.end_alone()
        self._ended(result, alone=True)
        return result is not None and result.path is None

    def load(self, state: Tree) -> None:
        self._report_changes(self.state.load_state_dict(state))
        self.saved_at = -1  # saved checkpoints may belong to another course
        self.is_named = True

    def begin_run(self, settings: Mapping[str, Any]) -> None:
        """Clean the folder, and record the settings; rename later checkpoints where a named state was loaded."""
        self.folder.clean(self._update)
        self.folder.record(dict(settings), self._update)
        if self.is_named and self.enabled:
            for text in self.folder.set_aside_after(self._update):
                self.reporter.say("checkpoint", self._update, text)
        self.is_named = False

    def resume(self, path: Path, *, new_settings: bool, reset: Collection[Reset] = ()) -> Path:
        """Go on from the checkpoint in `path`; gives its folder."""
        step, changed = self.state.load_checkpoint(path, new_settings=new_settings, reset=reset)
        self._report_changes(changed)
        self.saved_at = self._update
        self.resumed_from = str(step)
        self.is_named = True
        if self.folder.path is not None:
            self.folder.is_claimed |= step.resolve().is_relative_to(self.folder.path.resolve())
        return step

    def resume_newest(self, *, new_settings: bool) -> Path | None:
        """Go on from the newest sound checkpoint of the run folder; gives its folder, or None if there is none."""
        if self.folder.path is None:
            raise ArgumentError("`resume` needs a path, as this trainer has no `folder` to look into.", field="resume")
        paths = self.folder.newest_first()
        step = self._resume_first(paths, update=0, new_settings=new_settings)
        if step is None and paths:
            raise CheckpointError(
                f"none of {len(paths)} checkpoints in `{self.folder.checkpoints}` can be read; see "
                f"`evenstep inspect {paths[0]} --verify`, or delete the folder to start over."
            )
        self.folder.is_claimed = True
        return step

    def go_back(self, update: int, fault: str) -> None:
        """Go back to the newest checkpoint of fewer than `update` updates; later ones are deleted.

        Args:
            fault: what went wrong in that update, as a sentence.
        """
        cuts = self.state.engine.parts.context.cuts
        limit = cuts.limit  # a batch that did not fit then would not fit now
        # after a second fault at the same update the checkpoint itself may be the cause
        before = update if self._last is None or update > self._last[0] else self._last[1]
        self.settle()
        path = self._resume_first(self.folder.newest_first(before=before), update=before, new_settings=True)
        if path is None:
            raise CheckpointError(
                f"{fault} `{self.folder.path}` has no checkpoint of fewer than {before} updates to go back to; keep "
                f"more (`checkpoint.keep_last`), or take another policy in `failures`."
            )
        cuts.limit = limit
        now = self._update
        self._last = update, now
        self.reporter.writers.rewind(now)
        self.folder.leave_after(now)
        self.reporter.say("rewind", now, f"the run went back to {path.name}, from before update {update}.")

    def _resume_first(self, paths: Sequence[Path], *, update: int, new_settings: bool) -> Path | None:
        for path in paths:
            try:
                self.folder.bring(path)
                step = self.resume(path, new_settings=new_settings)
            except UnreadableError as error:
                if self.folder.group.rank == 0:
                    self.reporter.say("checkpoint", update, f"{path.name} was skipped: {error}")
            else:
                self.is_named = False  # later ones can't be read, or are deleted
                return step
        return None

    def _is_of_a_disk(self, error: CheckpointError) -> bool:
        # only the rank of the failing disk has the cause
        return any(self.folder.group.gather(isinstance(error.__cause__, OSError)))

    def _ended(self, result: SaveResult | None, *, raises: bool = False, alone: bool = False) -> None:
        if result is None:
            return
        error, is_saved = result.error, result.path is not None
        if is_saved:
            self._path = self.folder.checkpoint_of(result.update)
            self.saved_at = result.update
        failed = None if is_saved or not (raises or isinstance(error, ReplicaError)) else error
        self._span.__exit__(type(failed) if failed else None, failed, failed and failed.__traceback__)
        if error is None:
            return
        if raises or (not alone and isinstance(error, ReplicaError)):
            raise error
        end = "" if is_saved or alone else " Training goes on; the next save tries again."
        self.reporter.say("save_failed", result.update, f"{error}{end}")

    def _report_changes(self, texts: list[str]) -> None:
        if texts and self.folder.group.rank == 0:
            message = f"the run goes on with changes: {'; '.join(texts)}."
            self.reporter.say("resumed", self._update, message, details={"changed": texts})

    def _require(self) -> AsyncWriter:
        if self._writer is None:
            field = "folder" if self.folder.path is None else "keep_last"
            raise ArgumentError(f"this trainer saves nothing: set `{field}`.", field=field)
        return self._writer
