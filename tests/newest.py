"""The newest checkpoint that can be read, as a resume finds it."""

from pathlib import Path

from evenstep.checkpoint import CheckpointReader, complete_checkpoints, read_checkpoint
from evenstep.checkpoint.folders import checkpoints_folder
from evenstep.errors import CheckpointError


def newest_checkpoint(folder: Path) -> tuple[CheckpointReader | None, list[Path]]:
    """The newest sound checkpoint of a folder of checkpoints or a run, and the newer ones that can't be read."""
    rejected: list[Path] = []
    for path in reversed(complete_checkpoints(checkpoints_folder(folder))):
        try:
            return read_checkpoint(path), rejected
        except CheckpointError:
            rejected.append(path)
    return None, rejected
