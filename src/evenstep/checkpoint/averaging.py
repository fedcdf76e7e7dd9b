"""The mean of the weights of several checkpoints, as a checkpoint of weights.

θ̄ = (1/n) · Σ_i θ_i        in float64 (complex128), rounded once to the saved format
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.arguments import format_name
from evenstep.checkpoint.folders import CHECKPOINTS, checkpoints_folder, complete_checkpoints, is_complete, step_update
from evenstep.checkpoint.read import CheckpointReader
from evenstep.checkpoint.state import unpack
from evenstep.checkpoint.write import CheckpointWrite
from evenstep.errors import ArgumentError, CheckpointError

AVERAGES = "averages"
WEIGHTS = ("model", "ema")  # the parts that are averaged


def average_checkpoints(paths: Sequence[Path | str], folder: Path | str, *, name: str = "average") -> Path:
    """Write the mean of the weights of two or more checkpoints of one model as the checkpoint `folder / name`.

    Integers and flags are those of the newest checkpoint. The average of the parameters is averaged as well, if all
    checkpoints have one. An older average of that name is replaced.

    >>> import tempfile
    >>> from evenstep.checkpoint import read_checkpoint, write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     saved = Path(run) / "checkpoints"
    ...     of = [write_checkpoint(saved, n, {"model": {"bias": torch.full((2,), float(n))}}) for n in (1, 4)]
    ...     read_checkpoint(average_checkpoints(of, run)).state["model"]
    {'bias': tensor([2.5000, 2.5000])}
    """
    folder = Path(folder).expanduser()
    target = folder / name
    if target.exists() and not (is_complete(target) and "averaged" in CheckpointReader(target).values):
        raise ArgumentError(f"`{target}` exists already and is no average; give another place.", field="name")
    if len({Path(path).resolve() for path in paths}) < 2:
        raise ArgumentError(
            f"`paths` must be two or more checkpoints, but is {[str(path) for path in paths]}.", field="paths"
        )
    readers = sorted((CheckpointReader(path) for path in paths), key=lambda reader: reader.update)
    newest = readers[-1]
    state: dict[str, Any] = {"averaged": {"of": [str(reader.path) for reader in readers]}}
    for part in WEIGHTS:
        if all(_formats(reader, part) for reader in readers):
            _check_alike(readers, part)
            state[part] = _part(newest, part, lambda name: _mean([reader.tensor(name) for reader in readers]))
    if "model" not in state:
        raise CheckpointError("a checkpoint has no weights of a model to average; give checkpoints of a run.")
    for reader in readers:
        reader.verify()
    state["run"] = _part(newest, "run", newest.tensor)
    return CheckpointWrite(folder, newest.update, state, name=name).run()


def last_checkpoints(run: Path, count: int, *, until: int | None = None) -> list[Path]:
    """The newest `count` complete checkpoints of a run up to update `until`, the oldest first."""
    known = complete_checkpoints(checkpoints_folder(run))
    found = [path for path in known if until is None or (step_update(path.name) or 0) <= until]
    if len(found) < count:
        names = ", ".join(path.name for path in found)
        raise ArgumentError(
            f"`{run}` has {len(found)} checkpoints ({names}) instead of {count}; average fewer, or let the run keep "
            f"more, `checkpoint.keep_last = {count}`.",
            field="last",
        )
    return found[-count:]


def averages_of(run: Path) -> Path:
    """The default folder of a run's averages."""
    return (run.parent if run.name == CHECKPOINTS else run) / AVERAGES


def _formats(reader: CheckpointReader, part: str) -> dict[str, str]:
    """Dtype and shape of each tensor of a part, by `PART/NAME`."""
    found = ((name, entry) for name, entry in reader.tensors.items() if name.startswith(f"{part}/"))
    return {name: f"{format_name(entry.dtype)} {list(entry.shape)}" for name, entry in found}


def _check_alike(readers: Sequence[CheckpointReader], part: str) -> None:
    newest = readers[-1]
    wanted = _formats(newest, part)
    for reader in readers:
        found = _formats(reader, part)
        name = next((name for name in {**wanted, **found} if found.get(name) != wanted.get(name)), None)
        if name is not None:
            raise CheckpointError(
                f"`{reader.path}` is of another model than `{newest.path}`: `{name}` is {found.get(name, 'missing')} "
                f"instead of {wanted.get(name, 'missing')}. Give checkpoints of one model."
            )


def _part(reader: CheckpointReader, part: str, read: Callable[[str], Tensor]) -> object:
    tensors = {name.partition("/")[2]: read(name) for name in _formats(reader, part)}
    return unpack(reader.values.get(part, {}), tensors)


def _mean(values: Sequence[Tensor]) -> Tensor:
    newest = values[-1]
    has_mean = newest.is_floating_point() or newest.is_complex()
    if not has_mean or all(torch.equal(value, newest) for value in values):
        return newest
    wide = torch.complex128 if newest.is_complex() else torch.float64
    total = torch.zeros_like(newest, dtype=wide)
    for value in values:
        total += value.to(wide)
    return (total / len(values)).to(newest.dtype)
