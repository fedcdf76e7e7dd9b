"""Checkpoints that a failing run writes, of its state as of the last committed update.

    checkpoints/step-00000123/                        an ordinary checkpoint, where a rank holds the whole state
    emergency/update-00000123-part-00001-of-00002/    else the part of one rank, in the format of checkpoints

Ranks do not communicate, as others may be gone. Of ranks that hold the same, the first that makes the folder writes it.
A resume joins the parts to a checkpoint if all of them are there, sound and of one update.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from evenstep.checkpoint.folders import (
    CHECKPOINTS,
    CLAIM,
    EMERGENCY,
    complete_checkpoints,
    disk_error,
    disk_errors,
    is_complete,
    step_name,
    step_update,
)
from evenstep.checkpoint.read import read_checkpoint
from evenstep.checkpoint.retention import discard
from evenstep.checkpoint.state import is_sharded, local_of
from evenstep.checkpoint.write import CheckpointWrite, write_checkpoint
from evenstep.errors import CheckpointError

_NAME = re.compile(r"update-(\d{8,18})-part-(\d{5,})-of-(\d{5,})")
# keys of the state that are divided between ranks; the others are equal on all, except streams
_SHARED = ("model", "optimizer", "ema", "trained", "training", "each_rank")


def write_emergency(
    folder: Path, update: int, state: Mapping[str, object], *, resumed_from: str | None = None
) -> Path | None:
    """Save `state` as the checkpoint of `update`, without other ranks; arguments are those of `write_checkpoint`.

    Returns:
        The checkpoint, or None if it exists or another rank writes it.
    """
    write = partial(write_checkpoint, folder, update, state, resumed_from=resumed_from)
    return _write_once(folder, step_name(update), write)


def write_part(
    run: Path,
    update: int,
    state: Mapping[str, object],
    *,
    place: int,
    places: int,
    resumed_from: str | None = None,
) -> Path | None:
    """Save this rank's part of the state after `update`, without other ranks.

    Args:
        state: as for `write_checkpoint`; tensors may be cut over ranks and names be missing.
        place, places: number of this part, and of all parts; equal on ranks that hold the same part.

    Returns:
        The part's folder, or None if another rank with the same part saves it.
    """
    name = f"update-{update:08d}-part-{place:05d}-of-{places:05d}"
    folder = run / EMERGENCY

    def write() -> Path:
        cuts: dict[str, object] = {}
        held: dict[str, object] = {key: _uncut(tree, key, cuts) for key, tree in state.items()}
        held["part"] = {"cuts": cuts, "resumed_from": resumed_from}
        return CheckpointWrite(folder, update, held, name=name).run()

    return _write_once(folder, name, write)


def join_parts(run: Path) -> tuple[Path | None, str]:
    """Make a checkpoint of the parts of the newest update in the folder of a failed run.

    Returns:
        The checkpoint, or None; and a sentence about it, "" if no part is newer than the newest checkpoint.
    """
    folder = run / EMERGENCY
    found = _found(folder)
    saved = [step_update(path.name) or 0 for path in complete_checkpoints(run / CHECKPOINTS)]
    update = max((update for update, _ in found), default=-1)
    if update <= max(saved, default=-1):
        return None, ""
    places = next(count for (number, count) in found if number == update)
    parts = found[update, places]
    missing = [place for place in range(places) if place not in parts]
    what = f"the state after update {update} of a failed run, in `{folder}`,"
    if missing:
        numbers = ", ".join(str(place + 1) for place in missing)
        return None, f"{what} can't be used: of its {places} parts, {numbers} is missing."
    try:
        states = [read_checkpoint(parts[place]).state for place in range(places)]
        joined = _joined(states)
    except (CheckpointError, ValueError) as error:
        return None, f"{what} can't be used: {error}"
    resumed_from = states[0]["part"]["resumed_from"]
    path = write_checkpoint(run / CHECKPOINTS, update, joined, resumed_from=resumed_from)
    return path, f"{what} was put together from {places} parts: {path}."


def discard_parts(run: Path) -> list[str]:
    """Delete the parts of failed runs; gives a sentence if there were any."""
    folder = run / EMERGENCY
    if not folder.is_dir():
        return []
    with disk_errors(f"`{folder}`, left by a run that failed, cannot be deleted"):
        discard(folder)
    return [f"removed `{EMERGENCY}`, in which a failed run had left parts of its state"]


def _write_once(folder: Path, name: str, write: Callable[[], Path]) -> Path | None:
    if is_complete(folder / name):
        return None
    claim = folder / f"{CLAIM}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim.mkdir()
    except FileExistsError:
        return None
    except OSError as error:
        raise disk_error(f"nothing can be saved in `{folder}`", error) from error
    try:
        return write()
    finally:
        claim.rmdir()


def _found(folder: Path) -> dict[tuple[int, int], dict[int, Path]]:
    found: dict[tuple[int, int], dict[int, Path]] = {}
    with disk_errors(f"`{folder}` cannot be listed"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and is_complete(path):
                update, place, places = map(int, match.groups())
                found.setdefault((update, places), {})[place] = path
    return found


def _uncut(node: object, path: str, cuts: dict[str, object]) -> object:
    if is_sharded(node):
        leaf = cast("Any", node)
        chunks = leaf.__create_chunk_list__()
        offsets = list(chunks[0].offsets) if chunks else None  # None: this rank has no element
        cuts[path] = {"shape": list(leaf.size()), "offsets": offsets, "block": local_of(leaf)}
        return None
    if isinstance(node, dict):
        return {key: _uncut(value, f"{path}/{key}", cuts) for key, value in cast("dict[Any, Any]", node).items()}
    if isinstance(node, list):
        return [_uncut(value, f"{path}/{place}", cuts) for place, value in enumerate(cast("list[object]", node))]
    return node


def _joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cuts: dict[str, list[Any]] = {}
    for state in states:
        for path, cut in state["part"]["cuts"].items():
            cuts.setdefault(path, []).append(cut)
    wholes = {path: _whole(path, blocks) for path, blocks in cuts.items()}
    if cuts:
        _check_replicated([state["model"] for state in states])
    whole = {
        key: _merged([state[key] for state in states], key, wholes) if key in _SHARED else value
        for key, value in states[0].items()
        if key != "part"
    }
    data = [state["data"] for state in states if "data" in state]
    if data:  # streams, which have a state per rank
        of_ranks = {rank: state for one in reversed(data) for rank, state in one["states"].items()}
        whole["data"] = {**data[0], "states": of_ranks}
    return whole


def _check_replicated(models: Sequence[Mapping[str, Any]]) -> None:
    # a hook that changes the model may have failed on one rank after it had changed the model of others
    for name in dict.fromkeys(name for model in models for name in model):
        held = [model[name] for model in models if isinstance(model.get(name), Tensor)]
        for one in held[1:]:
            if one.shape != held[0].shape or not ((one == held[0]) | (one.isnan() & held[0].isnan())).all():
                raise CheckpointError(
                    f"its parts have different `{name}`, as some ranks had changed it before the failure.", field=name
                )


def _whole(path: str, cuts: Sequence[Any]) -> Tensor:
    shape = cuts[0]["shape"]
    held = {tuple(cut["offsets"]): cut["block"] for cut in cuts if cut["offsets"] is not None and cut["block"].numel()}
    whole = torch.empty(shape, dtype=cuts[0]["block"].dtype)
    times = torch.zeros(shape, dtype=torch.uint8)  # how often each element is held
    for offsets, block in held.items():
        at = tuple(slice(begin, begin + size) for begin, size in zip(offsets, block.shape, strict=True))
        whole[at] = block
        times[at] += 1
    if not bool((times == 1).all()):
        raise CheckpointError(f"its parts do not make up `{path}` of shape {shape}.", field=path)
    return whole


def _merged(nodes: Sequence[Any], path: str, wholes: Mapping[str, Tensor]) -> Any:
    first = nodes[0]
    if path in wholes:
        return wholes[path]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for node in nodes for key in cast("dict[Any, Any]", node))
        return {key: _merged([node[key] for node in nodes if key in node], f"{path}/{key}", wholes) for key in keys}
    if isinstance(first, list) and all(isinstance(one, str) for node in nodes for one in cast("list[object]", node)):
        return list(dict.fromkeys(name for node in nodes for name in node))
    if isinstance(first, list):
        return [_merged(ones, f"{path}/{place}", wholes) for place, ones in enumerate(zip(*nodes, strict=True))]
    return first
