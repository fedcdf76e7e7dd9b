"""The mean of the weights of several checkpoints, as a checkpoint of weights.

    θ̄ = (1/n) · Σ_i θ_i        in float64 (complex128), rounded once to the format that they are saved in

What is the same in all of them is kept as it is. A mean of integers or flags means nothing (an index, a mask, a count
of batches), so where those differ the newest's are taken, by name. The average that follows the parameters is averaged
as well, if all checkpoints have one. Optimizer, counters and data are no part of the result: a run can begin with it,
but not go on from it. Every byte that was read is verified before anything is written.
Reference: Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization, arXiv:1803.05407.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from evenstep.arguments import first_of, format_name
from evenstep.checkpoint.folders import (
    CHECKPOINTS,
    checkpoints_folder,
    complete_checkpoints,
    is_complete,
    step_update,
)
from evenstep.checkpoint.reader import CheckpointReader
from evenstep.checkpoint.writer import CheckpointWrite
from evenstep.errors import ArgumentError, CheckpointError

AVERAGES = "averages"
WEIGHTS = ("model", "ema")  # the parts that are averaged


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedCheckpoint:
    """What was averaged.

    Args:
        path: of the checkpoint of the mean.
        of: the checkpoints, the oldest first.
        averaged: how many tensors are means.
        same: how many were the same in all.
        newest: the names of integers and flags that differ, which are those of the newest.
        not_finite: the names of what has inf in all of them, such as a mask. Where NaN is, or inf that is not in all of
            them, no mean is made.
    """

    path: Path
    of: tuple[Path, ...]
    averaged: int
    same: int
    newest: tuple[str, ...]
    not_finite: tuple[str, ...]


def average_checkpoints(
    paths: Sequence[Path | str], folder: Path | str, *, name: str = "average"
) -> AveragedCheckpoint:
    """Write the mean of the weights of several checkpoints of one model as the checkpoint `folder / name`.

    It is complete or not there, as every checkpoint, and takes the place of one of that name.

    Args:
        paths: of the checkpoints, two or more; how they were cut over ranks and stages does not matter.
        folder: where it is put; made if need be.
        name: of it.

    Raises:
        ArgumentError: fewer than two checkpoints, or something else than an average stands at that place.
        CheckpointError: one that can't be read, or that is of another model than the newest; nothing is written then.

    >>> import tempfile
    >>> from evenstep.checkpoint import read_checkpoint, write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     of = [write_checkpoint(Path(run), n, {"model": {"bias": torch.full((2,), float(n))}}) for n in (1, 4)]
    ...     read_checkpoint(average_checkpoints(of, run).path).state["model"]
    {'bias': tensor([2.5000, 2.5000])}
    """
    folder = Path(folder).expanduser()
    _check_place(folder / name)
    if len({Path(path).resolve() for path in paths}) < 2:
        raise ArgumentError(
            f"`paths` must be two or more checkpoints, but is {[str(path) for path in paths]}.", field="paths"
        )
    readers = sorted((CheckpointReader(path) for path in paths), key=lambda reader: reader.update)
    for reader in readers:
        reader.load(lambda _: True)
    parts = [part for part in WEIGHTS if all(reader.state.get(part) for reader in readers)]
    newest = readers[-1]
    if "model" not in parts:
        without = next(reader for reader in readers if not reader.state.get("model"))
        raise CheckpointError(f"`{without.path}` has no weights of a model to average; give checkpoints of a run.")
    for reader, part in ((reader, part) for reader in readers for part in parts):
        _check_alike(reader, newest, part)
    mean = _Mean(readers)
    state: dict[str, Any] = {part: mean.of(part) for part in parts}
    for reader in readers:
        reader.verify()
    state["averaged"] = {"of": [str(reader.path) for reader in readers], "newest": sorted(set(mean.newest))}
    state["run"] = newest.state.get("run", {})
    path = CheckpointWrite(folder, newest.update, state, name=name).run()
    return AveragedCheckpoint(
        path=path,
        of=tuple(reader.path for reader in readers),
        averaged=mean.averaged,
        same=mean.same,
        newest=tuple(sorted(set(mean.newest))),  # the model's and the average's have the same names
        not_finite=tuple(sorted(set(mean.not_finite))),
    )


def last_checkpoints(run: Path, count: int, *, until: int | None = None) -> list[Path]:
    """The newest `count` complete checkpoints of a run, the oldest first.

    Args:
        until: the update of the last one that counts; None for the newest there is.

    Raises:
        ArgumentError: there is no such run, or not so many.
    """
    folder = checkpoints_folder(run)
    if not run.is_dir():
        raise ArgumentError(f"there is no run `{run}`; give the folder of a run.")
    known = complete_checkpoints(folder)
    found = [path for path in known if until is None or (step_update(path.name) or 0) <= until]
    if len(found) < count:
        upto = "" if until is None else f" up to update {until}"
        raise ArgumentError(
            f"the last {count} checkpoints{upto} were asked for, but `{run}` has {_names(found)}; ask for as many as "
            f"there are, or let the run keep more, `checkpoint.keep_last = {count}`."
        )
    return found[-count:]


def averages_of(run: Path) -> Path:
    """The folder that a run's averages are put into by default."""
    return (run.parent if run.name == CHECKPOINTS else run) / AVERAGES


def _check_place(target: Path) -> None:
    if target.exists() and not (is_complete(target) and "averaged" in CheckpointReader(target).values):
        raise ArgumentError(
            f"`{target}` exists already and is no average of checkpoints, so it would be lost; nothing in it was "
            f"touched. Give another place, or move it away."
        )


def _names(paths: Sequence[Path]) -> str:
    return f"{len(paths)} ({', '.join(path.name for path in paths)})" if paths else "none"


def _check_alike(reader: CheckpointReader, newest: CheckpointReader, part: str) -> None:
    one, other = _described(reader.state[part]), _described(newest.state[part])
    faults = [f"`{name}` is missing" for name in other if name not in one]
    faults += [f"`{name}` is not in that" for name in one if name not in other]
    common = [name for name in one if name in other]
    faults += [f"`{name}` is {one[name]} instead of {other[name]}" for name in common if one[name] != other[name]]
    if faults:
        raise CheckpointError(
            f"the weights of `{reader.path}` are of another model than those of `{newest.path}`, so they have no mean: "
            f"{first_of(faults, 5, '; ')}. Give checkpoints of "
            f"one model."
        )


def _described(tensors: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{format_name(one.dtype)} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
        for name, one in tensors.items()
    }


class _Mean:
    def __init__(self, readers: Sequence[CheckpointReader]) -> None:
        self._readers = readers
        self._known: dict[int, Tensor] = {}
        self.averaged = self.same = 0
        self.newest: list[str] = []
        self.not_finite: list[str] = []

    def of(self, part: str) -> dict[str, Any]:
        return {name: self._one(part, name) for name in self._readers[-1].state[part]}

    def _one(self, part: str, name: str) -> Any:
        outline = self._readers[-1].state[part][name]
        if not isinstance(outline, Tensor):
            return outline
        if id(outline) not in self._known:  # tied tensors are one
            self._known[id(outline)] = self._mean(part, name)
        return self._known[id(outline)]

    def _mean(self, part: str, name: str) -> Tensor:
        newest = _value(self._readers[-1], part, name)
        has_mean = newest.is_floating_point() or newest.is_complex()
        total = newest.to(torch.complex128 if newest.is_complex() else torch.float64, copy=True) if has_mean else newest
        same = True
        for reader in self._readers[:-1]:
            value = _value(reader, part, name)
            same = same and torch.equal(value, newest)
            if has_mean:
                total += value.to(total.dtype)
        if same:
            self.same += 1
            if has_mean and not bool(torch.isfinite(total).all()):
                self.not_finite.append(name)
            return newest
        if not has_mean:
            self.newest.append(name)
            return newest
        self.averaged += 1
        mean = total / len(self._readers)
        if not bool(torch.isfinite(mean).all()):
            self._refuse(part, name)
        return mean.to(newest.dtype)

    def _refuse(self, part: str, name: str) -> None:
        bad = [one for one in self._readers if not bool(torch.isfinite(_value(one, part, name).double()).all())]
        where = ", ".join(f"`{reader.path}`" for reader in bad)
        raise CheckpointError(
            f"`{name}` has a mean that is not finite, since it is not in {where or 'their sum'}; leave "
            f"{'that checkpoint' if len(bad) == 1 else 'those checkpoints'} out.",
            field=name,
        )


def _value(reader: CheckpointReader, part: str, name: str) -> Tensor:
    held = reader.state[part][name]
    return reader.read(held) if held.is_meta else held
