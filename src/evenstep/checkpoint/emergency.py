"""Checkpoint that a failing run writes: its state as of the last committed update.

Every rank acts alone, as the others may be gone: of ranks that hold the same state, the one that makes the folder first
writes it. The result is an ordinary checkpoint. The caller answers for the state.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from evenstep.checkpoint.folders import CLAIM, is_complete, step_name
from evenstep.checkpoint.writer import write_checkpoint
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
