"""Writes a checkpoint so that at every instant it is either complete or not there.

    .saving-step-…/ ← each rank's files, synced
                    ← manifest.json with every file's size and checksum, last
    sync the folder, rename it to step-…, sync its parent, then let `latest` say its name

A checkpoint of the same update is replaced, since after a rewind it would be of a past that did not happen; it
stays readable until the new one has its name. Nothing is deleted here besides; see `retention`.
"""

from collections.abc import Mapping
from pathlib import Path

from evenstep.checkpoint.ranks import ALONE, Ranks, together
from evenstep.checkpoint.save import Save
from evenstep.checkpoint.storage import LOCAL_DISK, Disk


def write_checkpoint(
    folder: Path,
    update: int,
    state: Mapping[str, object],
    *,
    group: Ranks = ALONE,
    disk: Disk = LOCAL_DISK,
    resumed_from: str | None = None,
) -> Path:
    """Write `state` as the checkpoint of `update`, and return its folder once it would survive a loss of power.

    If no tensor is cut over ranks, the first rank writes all: each top-level key of the state that holds tensors
    becomes `KEY.safetensors`, the tensors named by their path below the key; everything else goes to `state.json`. Of
    tied tensors in one file the first name is stored, as `safetensors.torch.load_model` expects. If some are cut
    (DTensors or `Shard`s), each rank writes `rank-NNNNN.safetensors`, and `tensors.json` says what lies where; what is
    whole on all ranks is spread over them.

    Args:
        folder: the folder of checkpoints, `RUN/checkpoints`, the same on all ranks; made if need be. `RUN/latest` is
            then set.
        update: number of committed updates in the state.
        state: a nested tree of dict, list, tuple, Tensor, str, int, float, bool and None; must not change meanwhile.
            All ranks give the same tree; of what is not a tensor, the first rank's is saved.
        group: the ranks, all of which call this.
        disk: through which all is written.
        resumed_from: the checkpoint that the run went on from, for people.

    Raises:
        CheckpointError: a state that cannot be saved, or a disk that does not take it, on any rank; all ranks raise
            then, whatever was begun is removed, earlier checkpoints are as they were.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as run:
    ...     path = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     path.name, sorted(file.name for file in path.iterdir()), (Path(run) / "latest").read_text()
    ('step-00000010', ['manifest.json', 'model.safetensors', 'state.json'], 'step-00000010\\n')
    """
    save = Save(folder, update, state, group=group, disk=disk, resumed_from=resumed_from)
    try:
        receipts = together(group, save.write)
        return together(group, lambda: save.publish(receipts))[0]
    except BaseException as error:
        if leftover := save.abandon():
            error.add_note(leftover)
        raise
