"""The folder of a run: its owner, its checkpoints and their copies in the mirror."""

import json
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
    ended_on_all,
    locked,
    on_all_ranks,
    remove_checkpoint,
    step_name,
    step_update,
)
from evenstep.checkpoint.folders import CHECKPOINTS, is_complete
from evenstep.checkpoint.retention import set_aside
from evenstep.errors import ArgumentError, EvenstepError
from evenstep.events import Incident
from evenstep.events.files import replace_text
from evenstep.parallel import Group
from evenstep.train.state import Tree

_HEADINGS = {"metrics.jsonl": 0, "metrics.csv": 1}  # lines before the first values


@final
@dataclass(slots=True, kw_only=True)
class RunFolder:
    """The folder of a run; all ranks call its methods together.

    Args:
        path: None keeps nothing.
        mirror: address of the copies of checkpoints.
        is_claimed: True if this run may write into the folder, whatever is in it, as it goes on there.
    """

    path: Path | None
    group: Group
    report: Callable[[Incident], None]
    mirror: Mirror | None = None
    is_claimed: bool = False
    _is_held: bool = False
    _taken_over: str = ""

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path = self.path.absolute()  # also after a change of the working directory

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; asked only where there is a folder."""
        assert self.path is not None, "nothing is kept"
        return self.path / CHECKPOINTS

    def checkpoint_of(self, update: int) -> Path:
        return self.checkpoints / step_name(update)

    def newest_first(self, *, before: int | None = None) -> list[Path]:
        """Complete checkpoints of fewer than `before` updates, sound or not, also those in the mirror alone."""

        def saved() -> list[Path]:
            found = {step_update(path.name): path for path in complete_checkpoints(self.checkpoints)}
            for name in self.mirror.steps() if self.mirror is not None else []:
                found.setdefault(step_update(name), self.checkpoints / name)
            return [found[update] for update in sorted(found, key=lambda update: update or 0)]

        # where processes have not met yet, only the first knows of any
        found = self.group.first_rank_does(saved) or ()
        return [path for path in reversed(found) if before is None or (step_update(path.name) or 0) < before]

    def bring(self, path: Path) -> None:
        """Download the checkpoint `path` from the mirror to each machine that lacks it."""
        if self.mirror is None:
            return
        # ranks that see the folder of the first have it then
        self._fetch(self.mirror, path, mine=self.group.rank == 0 and not is_complete(path))
        here = gethostname()
        everybody = self.group.gather((here, is_complete(path)))
        lacking = [rank for rank, (host, is_there) in enumerate(everybody) if host == here and not is_there]
        self._fetch(self.mirror, path, mine=self.group.rank in lacking[:1])

    def _fetch(self, mirror: Mirror, path: Path, *, mine: bool) -> None:
        job = ended_on_all(self.group, lambda: mirror.fetch(path.name, path.parent) if mine else None)
        on_all_ranks(self.group, job.result)

    def leave_after(self, update: int, leave: Callable[[Path], object] = remove_checkpoint) -> None:
        """Delete the checkpoints of more than `update` updates; or `leave` them, except for those in the mirror."""

        def act() -> None:
            for path in complete_checkpoints(self.checkpoints):
                if (step_update(path.name) or 0) > update:
                    leave(path)
            for name in self.mirror.steps() if self.mirror is not None else []:
                if self.mirror is not None and (step_update(name) or 0) > update:
                    self.mirror.remove(name)

        self.group.first_rank_does(act)

    def set_aside_after(self, update: int) -> list[str]:
        """Rename the checkpoints of more than `update` updates, so that they do not count; gives a text on each."""
        for path in self.newest_first():
            if (step_update(path.name) or 0) > update:
                self.bring(path)
        texts: list[str] = []

        def rename(path: Path) -> None:
            name = set_aside(path).name
            texts.append(f"`{path.name}` was renamed to `{name}`, as this run goes on from update {update}.")

        self.leave_after(update, rename)
        return texts

    def claim(self) -> None:
        """Check that no other run has left its results here, before this run writes anything."""
        if self.path is None or self.is_claimed:
            return
        if not self.group.can_change:  # a restarted process finds the files of this run
            self.group.first_rank_does(self._check_unused)
        self.is_claimed = True

    def _check_unused(self) -> None:
        assert self.path is not None, "nothing is kept"
        if self.mirror is not None:
            self.mirror.check_unused()
        left = _trained_before(self.path)
        if left:
            raise ArgumentError(
                f"the folder `{self.path}` has {left} of another run, and nothing in it was touched. To go on with "
                f"that run: `trainer.resume()` before `trainer.train()`; to train another: give another `folder`.",
                field="folder",
            )

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep other runs out of the folder inside the `with`, which may be nested."""
        if self.path is None or self._is_held:
            yield
            return
        self._is_held = True
        try:
            with ExitStack() as held:
                take = partial(self._take, self.path, held)
                if not self.group.can_change:
                    self.group.first_rank_does(take)
                elif self.group.rank == 0:  # other ranks may join later
                    take()
                yield
        finally:
            self._is_held = False

    def _take(self, folder: Path, held: ExitStack) -> None:
        self._taken_over = held.enter_context(locked(folder)) or self._taken_over

    def clean(self, update: int) -> None:
        """Delete unfinished files of killed processes, and report them."""
        if self.path is None or self.group.rank:
            return
        texts = [self._taken_over, *clean_leftovers(self.checkpoints)]
        self._taken_over = ""
        texts += self.mirror.clean() if self.mirror is not None else []
        for text in filter(None, texts):
            self.report(Incident(kind="leftover", update=update, message=text))

    def record(self, settings: Tree, update: int) -> None:
        """Write the settings, which reports compare. An error is an incident, not the end of the run."""
        if self.path is None or self.group.rank:
            return
        try:
            replace_text(self.path / "settings.json", json.dumps(settings, indent=1, default=str) + "\n")
        except EvenstepError as error:
            self.report(Incident(kind="settings", update=update, message=str(error)))


def _trained_before(folder: Path) -> str:
    saved = [path for path in complete_checkpoints(folder / CHECKPOINTS) if step_update(path.name)]
    if saved:
        return f"checkpoints up to {saved[-1].name}"
    for name, headings in _HEADINGS.items():
        file = folder / name
        if file.is_file() and file.read_bytes().count(b"\n") > headings:
            return f"metrics in {name}"
    return ""
