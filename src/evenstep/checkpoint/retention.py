"""Deletes old checkpoints and leftovers of killed processes.

A checkpoint is renamed, loses its manifest, then its data, so a half-deleted one is never taken for a checkpoint.
"""

from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path

from evenstep import files
from evenstep.checkpoint.folders import (
    CLAIM,
    MANIFEST,
    REMOVING,
    complete_checkpoints,
    disk_errors,
    is_complete,
    step_update,
)
from evenstep.checkpoint.manifest import check_structure
from evenstep.errors import CheckpointError
from evenstep.files import REPLACED, SAVING

_LEFT = {SAVING: "a save", REMOVING: "a deletion", CLAIM: "an emergency save"}


def retain(
    folder: Path,
    *,
    keep_last: int | None,
    keep_every_updates: int | None = None,
    protect: Collection[str] = (),
) -> list[Path]:
    """Delete old checkpoints of a folder; gives them. Those with a missing or cut file are not counted nor deleted.

    Args:
        keep_last: how many of the newest to keep, at least 1; None keeps all.
        keep_every_updates: also keep those whose update is a multiple of this.
        protect: names of step folders to keep besides.
    """
    if keep_last is None:
        return []
    sound = {path.name: path for path in complete_checkpoints(folder) if _is_sound(path)}
    old = [sound[name] for name in superseded(list(sound), keep_last, keep_every_updates, protect)]
    for path in old:
        remove_checkpoint(path)
    return old


def superseded(
    names: Sequence[str], keep_last: int | None, keep_every_updates: int | None, protect: Collection[str]
) -> list[str]:
    """The checkpoints among `names`, the oldest first, that `retain` would delete.

    >>> superseded(["step-00000010", "step-00000015", "step-00000020"], 1, 10, ())
    ['step-00000015']
    """
    if keep_last is None:
        return []
    old = [name for name in names[:-keep_last] if name.removeprefix(REPLACED) not in protect]
    return [name for name in old if keep_every_updates is None or (step_update(name) or 0) % keep_every_updates]


def remove_checkpoint(path: Path) -> None:
    """Delete the step folder `path`; at every instant it is either complete or no checkpoint."""
    doomed = path.with_name(f"{REMOVING}{path.name.removeprefix(REPLACED)}")
    with disk_errors(f"the checkpoint `{path}` cannot be deleted"):
        if doomed.exists():
            discard(doomed)
        files.rename(path, doomed)
        discard(doomed)
        files.sync_path(path.parent)


def set_aside(path: Path) -> Path:
    """Rename the step folder `path` to `left-N-…`, which is neither counted nor deleted; gives the new path."""
    name = path.name.removeprefix(REPLACED)
    names = (path.with_name(f"left-{number}-{name}") for number in count(1))
    aside = next(one for one in names if not one.exists())
    with disk_errors(f"the checkpoint `{path}`, which this run does not go on from, cannot be renamed"):
        files.rename(path, aside)
        files.sync_path(path.parent)
    return aside


def clean_leftovers(folder: Path) -> list[str]:
    """Remove or finish leftovers of killed saves and deletions, while no save is in flight; gives a sentence each."""
    done: list[str] = []
    with disk_errors(f"leftovers of a killed process in `{folder}` cannot be removed"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith(REPLACED):
                done.append(settle_replaced(path.with_name(path.name.removeprefix(REPLACED))))
                continue
            left = next((what for prefix, what in _LEFT.items() if path.name.startswith(prefix)), None)
            if left is not None:
                discard(path)
                done.append(f"removed `{path.name}`, left by {left} that was interrupted")
    return done


def settle_replaced(new: Path) -> str:
    """End an interrupted replacement: delete the old checkpoint if the new one is complete, else put it back."""
    old = new.with_name(f"{REPLACED}{new.name}")
    if not is_complete(old) or is_complete(new):
        discard(old)
        return f"removed `{old.name}`, whose replacement is complete"
    if new.exists():
        discard(new)
    files.rename(old, new)
    files.sync_path(new.parent)
    return f"put `{new.name}` back, whose replacement was interrupted"


def discard(folder: Path) -> None:
    """Delete a folder, its manifest before anything else; of a link to a folder, the link."""
    if is_complete(folder) and not folder.is_symlink():
        files.remove_file(folder / MANIFEST)
        files.sync_path(folder)
    files.remove(folder)


def _is_sound(path: Path) -> bool:
    try:
        check_structure(path)
    except CheckpointError:
        return False
    return True
