"""What a failing run still saves: its state as of the last committed update, and the batch that it failed at.

Every rank acts alone, as the others may be gone: of ranks that hold the same state, the one that makes a folder first
saves it. The state becomes an ordinary checkpoint. The batch goes to `failures/update-NNNNNNNN-rank-NNNNN`, in the same
format. Whether the state can be trusted is for the caller to know.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from evenstep.checkpoint.folders import CHECKPOINTS, CLAIM, FAILURES, is_complete, step_name, step_update
from evenstep.checkpoint.reader import read_checkpoint
from evenstep.checkpoint.writer import CheckpointWrite, write_checkpoint
from evenstep.errors import CheckpointError


def write_emergency(
    folder: Path,
    update: int,
    state: Mapping[str, object],
    *,
    resumed_from: str | None = None,
) -> Path | None:
    """Save `state` as the checkpoint of `update`, unless that is there or another rank is at it; needs no other rank.

    Args:
        folder, update, state, resumed_from: as for `write_checkpoint`.

    Returns:
        The checkpoint, or None if it is not this rank's to write.

    Raises:
        CheckpointError: it cannot be written, or the state is cut over ranks.
    """
    write = partial(write_checkpoint, folder, update, state, resumed_from=resumed_from)
    return write_once(folder, step_name(update), write)


def write_once(folder: Path, name: str, write: Callable[[], Path]) -> Path | None:
    """Call `write`, which makes `folder / name`, unless that is there or another rank is at it; makes `folder`.

    Raises:
        CheckpointError: it cannot be written.
    """
    if is_complete(folder / name):
        return None
    claim = folder / f"{CLAIM}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim.mkdir()
    except FileExistsError:
        return None
    except OSError as error:
        raise CheckpointError(f"nothing can be saved in `{folder}`: {error.strerror}.") from error
    try:
        return write()
    finally:
        claim.rmdir()


def write_failure(run: Path, update: int, rank: int, failure: Mapping[str, object]) -> Path:
    """Save what a rank failed at.

    Args:
        failure: what is known of it, a state as for `write_checkpoint`.

    Raises:
        CheckpointError: it cannot be written.
    """
    name = f"update-{update:08d}-rank-{rank:05d}"
    return CheckpointWrite(run / FAILURES, update, {"failure": dict(failure)}, name=name).run()


def find_failure(path: Path) -> Path:
    """The folder of the failure that `path` means: itself, the one after the checkpoint `path`, or a run's newest.

    Of several ranks' the first one's that did not fail because of another.

    Raises:
        CheckpointError: there is none.
    """
    if path.parent.name == FAILURES and is_complete(path):
        return path
    step = step_update(path.name)
    run = path.parent.parent if step is not None and path.parent.name == CHECKPOINTS else path
    wanted = "update-*" if step is None else f"update-{step + 1:08d}-*"
    found = sorted(each for each in (run / FAILURES).glob(wanted) if is_complete(each))
    if not found:
        which = "" if step is None else f" of update {step + 1}"
        raise CheckpointError(
            f"there is no failure{which} in `{run / FAILURES}`; give the folder of a run that has failed, its "
            f"checkpoint of the update before, or a folder in its `{FAILURES}`."
        )
    newest = [each for each in found if each.name[:15] == found[-1].name[:15]]
    if len(newest) == 1:
        return newest[0]
    return next((one for one in newest if not _has_lost_another(one)), newest[0])


def _has_lost_another(failure: Path) -> bool:
    """Whether a rank failed only because of another: it has nothing to show."""
    return read_checkpoint(failure).state["failure"].get("error", "").startswith("LostRankError")
