"""The folder of a run: which run may write into it, and what lies there already."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import final

from evenstep.checkpoint import (
    Mirror,
    clean_leftovers,
    complete_checkpoints,
    discard_parts,
    join_parts,
    locked,
    patiently,
    remove_checkpoint,
    step_name,
    step_update,
)
from evenstep.checkpoint.folders import (
    CHECKPOINTS,
    EMERGENCY,
    LATEST,
    is_complete,
    without_manifest,
)
from evenstep.checkpoint.retention import set_aside
from evenstep.errors import ArgumentError, EvenstepError
from evenstep.events import Incident
from evenstep.events.files import replace_text
from evenstep.parallel import Group

_METRICS = ("metrics.jsonl", "metrics.csv")


@final
@dataclass(slots=True, kw_only=True)
class RunFolder:
    """The folder of a run.

    Args:
        path: of the folder; None keeps nothing.
        mirror: where its checkpoints are copied to.
        is_claimed: whether this run may write into the folder, whatever is in it: it goes on there.
    """

    path: Path | None
    group: Group
    report: Callable[[Incident], None]
    mirror: Mirror | None = None
    is_claimed: bool = False
    _depth: int = 0
    _taken_over: str = ""

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path = self.path.absolute()  # wherever the working directory is later

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; asked only where there is a folder."""
        assert self.path is not None, "nothing is kept"
        return self.path / CHECKPOINTS

    def checkpoint_of(self, update: int) -> Path:
        return self.checkpoints / step_name(update)

    def newest_first(self, *, before: int | None = None) -> list[Path]:
        """The complete checkpoints of fewer than `before` updates, sound or not, also those in the mirror alone.

        All ranks call it together.
        """
        # where processes have not met yet, only the first knows of any
        found = self.group.first_rank_does(self._saved) or ()
        return [path for path in reversed(found) if before is None or (step_update(path.name) or 0) < before]

    def _saved(self) -> list[Path]:
        found = {step_update(path.name): path for path in complete_checkpoints(self.checkpoints)}
        for name in [] if self.mirror is None else self.mirror.steps():
            found.setdefault(step_update(name), self.checkpoints / name)
        return [found[update] for update in sorted(found, key=lambda update: update or 0)]

    def bring(self, path: Path) -> None:
        """Fetch the checkpoint `path` from the mirror to each machine that lacks it; all ranks call it together."""
        if self.mirror is None:
            return
        # after the first rank has it, all have it that see the same folder
        self._fetch(self.mirror, path, mine=self.group.rank == 0 and not is_complete(path))
        here = gethostname()
        told = self.group.gather((here, is_complete(path)))
        lacking = [rank for rank, (host, there) in enumerate(told) if host == here and not there]
        self._fetch(self.mirror, path, mine=self.group.rank in lacking[:1])

    def _fetch(self, mirror: Mirror, path: Path, *, mine: bool) -> None:
        patiently(self.group, lambda: mirror.fetch(path.name, path.parent) if mine else None)

    def lost(self) -> list[str]:
        """The names of checkpoints without a manifest, the newest first; all ranks call it together."""
        found = self.group.first_rank_does(lambda: without_manifest(self.checkpoints)) or ()
        return [path.name for path in reversed(found)]

    def join_parts(self) -> None:
        """Make a checkpoint of the parts of a state that failing ranks have left; all ranks call it together."""

        def join() -> None:
            assert self.path is not None, "asked only where there is a folder"
            _, said = join_parts(self.path)
            if said:
                self.report(Incident(kind="emergency", update=0, message=said, details={}))

        self.group.first_rank_does(join)

    def forget_after(self, update: int) -> None:
        """Delete the checkpoints of more than `update` updates; all ranks call it together."""
        self._leave_after(update, remove_checkpoint)

    def set_aside_after(self, update: int) -> list[str]:
        """Give the checkpoints of more than `update` updates names that are not counted; says each in a sentence.

        All ranks call it together. What only the mirror has is fetched before.
        """
        for path in self.newest_first():
            if (step_update(path.name) or 0) > update:
                self.bring(path)
        said: list[str] = []

        def leave(path: Path) -> None:
            name = set_aside(path).name
            said.append(f"`{path.name}` is of a course that this run leaves at update {update}; it is `{name}` now.")

        self._leave_after(update, leave)
        return said

    def _leave_after(self, update: int, leave: Callable[[Path], None]) -> None:
        def act() -> None:
            found = complete_checkpoints(self.checkpoints)
            kept = [path for path in found if (step_update(path.name) or 0) <= update]
            for path in found[len(kept) :]:
                leave(path)
            if kept:
                self._name_latest(kept[-1].name, update)
            if (mirror := self.mirror) is not None:
                for name in mirror.steps():
                    if (step_update(name) or 0) > update:
                        mirror.remove(name)

        self.group.first_rank_does(act)

    def _name_latest(self, name: str, update: int) -> None:
        try:
            replace_text(self.checkpoints.with_name(LATEST), f"{name}\n")
        except EvenstepError as error:  # a full disk; the next save names itself there, and no run reads it
            self.report(Incident(kind="checkpoint", update=update, message=str(error), details={}))

    def claim(self) -> None:
        """Make the folder this run's, before it writes anything there; all ranks call it together."""
        if self.path is None or self.is_claimed:
            return
        if not self.group.can_change:  # where a process that comes back finds what its run has written
            self.group.first_rank_does(self._check_unused)
        self.is_claimed = True

    def _check_unused(self) -> None:
        assert self.path is not None, "looked at before"
        if self.mirror is not None:
            self.mirror.check_unused()
        left = _trained_before(self.path)
        if left:
            raise ArgumentError(
                f"the folder `{self.path}` is another run's, which has left {left}, and nothing in it was touched. "
                f"To go on with that run: `trainer.resume()` before `trainer.train()`; to keep it and train another: "
                f"give another `folder`; to start over: delete the folder first."
            )

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep other runs out of the folder; within another such `with`, nothing more. All ranks enter it together."""
        self._depth += 1
        try:
            with ExitStack() as held:
                if self._depth == 1 and self.path is not None:
                    take = partial(self._take, self.path, held)
                    if not self.group.can_change:
                        self.group.first_rank_does(take)
                    elif self.group.rank == 0:  # the others may be on their way yet
                        take()
                yield
        finally:
            self._depth -= 1

    def _take(self, folder: Path, held: ExitStack) -> None:
        if self.mirror is not None:
            self.mirror.check()
        self._taken_over = held.enter_context(locked(folder)) or self._taken_over

    def clean(self, update: int) -> None:
        """Delete what killed processes have left half written, and say so."""
        if self.path is None or self.group.rank:
            return
        taken, self._taken_over = [self._taken_over] if self._taken_over else [], ""
        done = [*taken, *clean_leftovers(self.checkpoints), *discard_parts(self.path)]
        for message in [*done, *(self.mirror.clean() if self.mirror is not None else [])]:
            self.report(Incident(kind="leftover", update=update, message=message, details={}))


def _trained_before(folder: Path) -> str:
    saved = [path for path in complete_checkpoints(folder / CHECKPOINTS) if step_update(path.name)]
    if saved:
        return f"checkpoints up to {saved[-1].name}"
    if (folder / EMERGENCY).is_dir():
        return f"parts of a state in {EMERGENCY}"
    for name in _METRICS:
        file = folder / name
        if file.is_file() and _has_values(file):
            return f"metrics in {name}"
    return ""


def _has_values(file: Path) -> bool:
    with file.open("rb") as lines:
        heading = next(lines, b"")
        return bool(next(lines, b"")) or heading.startswith(b"{")
