"""Names of checkpoints, and the search for them. `step-00001000` with a manifest is a complete checkpoint."""

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evenstep.errors import CheckpointError
from evenstep.files import REPLACED

CHECKPOINTS = "checkpoints"
MANIFEST, STATE, TABLE = "manifest.json", "state.json", "tensors.json"
REMOVING = ".removing-"  # being deleted
CLAIM = ".emergency-"  # claim of the rank of a failing run that saves this update
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

_STEP = re.compile(r"step-(\d{8,18})")
_LONGEST_NAME = 32  # bytes of a file that names a step folder
_MAX_NAMES = 10


def step_name(update: int) -> str:
    """Name of the folder of the checkpoint after `update` committed updates.

    >>> step_name(1000)
    'step-00001000'
    """
    return f"step-{update:08d}"


def step_update(name: str) -> int | None:
    """The update in the name of a step folder (also a `.replaced-` one), or None for another name.

    >>> step_update("step-00001000"), step_update(".replaced-step-00001000"), step_update("best")
    (1000, 1000, None)
    """
    match = _STEP.fullmatch(name.removeprefix(REPLACED))
    return int(match[1]) if match else None


def checkpoints_folder(path: Path) -> Path:
    """The folder of checkpoints in the run folder `path`, or `path` itself if it is that folder."""
    inner = path / CHECKPOINTS
    return inner if inner.is_dir() else path


def is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder of checkpoints, the oldest first; none if there is no folder."""
    found: dict[int, Path] = {}
    with disk_errors(f"the checkpoints in `{folder}` cannot be listed"):
        # `.replaced-step-…` sorts before `step-…`, which takes its place
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            update = step_update(path.name)
            if update is not None and is_complete(path):
                found[update] = path
    return [found[update] for update in sorted(found)]


def named_by(path: Path) -> Path:
    """The step folder that a file such as `best` of a run folder names; any other `path` as it is."""
    if not path.is_file() or path.stat().st_size > _LONGEST_NAME:
        return path
    name = path.read_text(errors="replace").strip()
    if step_update(name) is None:
        return path
    found = checkpoints_folder(path.parent) / name
    if not is_complete(found):
        raise CheckpointError(f"`{path}` names `{name}`, which is no complete checkpoint; give another.")
    return found


def locate(path: Path) -> Path:
    """The step folder at `path`, named by `path` (a file such as `best`), or the newest in `path`."""
    with disk_errors(f"`{path}` cannot be read"):
        path = named_by(path.expanduser())
        if is_complete(path):
            return path
        if path.is_dir() and step_update(path.name) is None:
            found = complete_checkpoints(checkpoints_folder(path))
            if found:
                return found[-1]
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
        names = ", ".join(sorted(entry.name for entry in nearest.iterdir())[-_MAX_NAMES:]) or "nothing"
    raise CheckpointError(f"`{path}` is no complete checkpoint, and no run folder with one; `{nearest}` holds {names}.")


@contextmanager
def disk_errors(what: str) -> Generator[None]:
    """Raise a CheckpointError that begins with `what` for an OSError inside the `with`."""
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error


def disk_error(what: str, error: OSError) -> CheckpointError:
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    place = f" at `{error.filename}`" if error.filename else ""
    advice = "Make the folder writable for this user, or put the run elsewhere."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        advice = "Free some space, keep fewer checkpoints, or put the run on another disk."
    return CheckpointError(f"{what}: {error.strerror or error} ({code}){place}. {advice}")
