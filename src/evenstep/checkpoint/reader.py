"""Reads a checkpoint back into a state, verifying every byte on the way and executing none.

Whoever names a checkpoint gets that one or an error; only `newest_checkpoint` falls back to an older one, and says
which it passed over and why. What the state is loaded into is not known here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from evenstep.checkpoint.layout import STATE, TENSORS_SUFFIX, checkpoints_folder, complete_checkpoints, locate
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.state import JSON, unpack
from evenstep.checkpoint.tensorfile import BadFileError, read_tensors
from evenstep.checkpoint.verify import check_structure, checked_file
from evenstep.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as read.

    Args:
        path: its step folder.
        update: number of committed updates in the state.
        state: as it was given to `write_checkpoint`; tensors on the device that was asked for.
        manifest: what the checkpoint says of itself.
    """

    path: Path
    update: int
    state: dict[str, object]
    manifest: Manifest


def read_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one of the run there.

    Args:
        path: a step folder, a folder of checkpoints or a run folder.
        device: where the tensors go.

    Raises:
        CheckpointError: no checkpoint there (the message lists what is), or one that is damaged or foreign.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     read_checkpoint(run).state
    {'model': {'bias': tensor([1., 1.])}}
    """
    step = locate(Path(path))
    manifest = check_structure(step)
    tensors: dict[str, Mapping[str, torch.Tensor]] = {}
    skeletons: dict[str, JSON] = {}
    for name, entry in manifest.files.items():
        with checked_file(step / name, entry) as file:
            if name.endswith(TENSORS_SUFFIX):
                tensors[name.removesuffix(TENSORS_SUFFIX)] = read_tensors(file, torch.device(device))
            elif name == STATE:
                skeletons = _parse(file.read(file.size))
            else:
                raise BadFileError("is of no known kind")
    if spare := tensors.keys() - skeletons.keys():
        name = f"{min(spare)}{TENSORS_SUFFIX}"
        raise CheckpointError(f"`{step / name}` is not mentioned in `{STATE}`; do not trust it.")
    state = {part: unpack(skeleton, tensors.get(part, {}), part) for part, skeleton in skeletons.items()}
    return Checkpoint(path=step, update=manifest.update, state=state, manifest=manifest)


def newest_checkpoint(
    folder: Path | str, device: torch.device | str = "cpu"
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be read, and the newer ones that cannot, each with the reason.

    Args:
        folder: a folder of checkpoints or a run folder; need not exist.
        device: where the tensors go.

    Raises:
        CheckpointError: a folder that cannot be listed.

    >>> newest_checkpoint("runs/none")
    (None, [])
    """
    rejected: list[tuple[Path, str]] = []
    for path in reversed(complete_checkpoints(checkpoints_folder(Path(folder)))):
        try:
            return read_checkpoint(path, device), rejected
        except CheckpointError as error:
            rejected.append((path, str(error)))
    return None, rejected


def _parse(data: bytes) -> dict[str, JSON]:
    try:
        content: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise BadFileError("is not a JSON object")
    return cast("dict[str, JSON]", content)
