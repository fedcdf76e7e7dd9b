"""The mean of the weights of several checkpoints, as a checkpoint of weights.

    θ̄ = (1/n) · Σ_i θ_i        in float64 (complex128), rounded once to the saved format

Tensors that are equal in all checkpoints are kept. Integers and flags have no mean: where they differ, the newest
checkpoint's are taken, and reported. The average of the parameters is averaged as well, if all checkpoints have one.
Optimizer, counters and data are left out: a run can begin with the result, not go on from it. Reference: Izmailov et
al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization, arXiv:1803.05407.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from evenstep.arguments import first_of, format_name
from evenstep.checkpoint.folders import CHECKPOINTS, checkpoints_folder, complete_checkpoints, is_complete, step_update
from evenstep.checkpoint.read import CheckpointReader
from evenstep.checkpoint.write import CheckpointWrite
from evenstep.errors import ArgumentError, CheckpointError

AVERAGES = "averages"
WEIGHTS = ("model", "ema")  # the parts that are averaged


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedCheckpoint:
    """Result of `average_checkpoints`.

    Args:
        path: the checkpoint of the mean.
        of: the averaged checkpoints, the oldest first.
        averaged: number of tensors that are means.
        same: number of tensors that are equal in all.
        newest: names of integers and flags that differ, which are those of the newest.
        not_finite: names of equal tensors with inf, such as a mask. NaN, or inf in some only, is refused.
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

    `load_weights`, `export_weights` and `init_from` take it as any checkpoint. An older average of that name is
    replaced.

    Args:
        paths: two or more checkpoints, of any ranks and stages.
        folder: made if need be.
        name: of the new checkpoint's folder.

    Raises:
        ArgumentError: fewer than two checkpoints, or `folder / name` exists and is no average.
        CheckpointError: a checkpoint that can't be read, or of another model than the newest; nothing is written then.

    >>> import tempfile
    >>> from evenstep.checkpoint import read_checkpoint, write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     saved = Path(run) / "checkpoints"
    ...     of = [write_checkpoint(saved, n, {"model": {"bias": torch.full((2,), float(n))}}) for n in (1, 4)]
    ...     read_checkpoint(average_checkpoints(of, run).path).state["model"]
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
    for reader in readers:
        reader.load(lambda _: True)
        if not reader.state.get("model"):
            raise CheckpointError(f"`{reader.path}` has no weights of a model to average; give checkpoints of a run.")
    means = _Means(readers)
    parts = [part for part in WEIGHTS if all(reader.state.get(part) for reader in readers)]
    for part in parts:
        means.check_alike(part)
    state: dict[str, Any] = {part: means.of_part(part) for part in parts}
    for reader in readers:
        reader.verify()
    newest = readers[-1]
    state["averaged"] = {"of": [str(reader.path) for reader in readers], "newest": sorted(means.newest)}
    state["run"] = newest.state.get("run", {})
    return AveragedCheckpoint(
        path=CheckpointWrite(folder, newest.update, state, name=name).run(),
        of=tuple(reader.path for reader in readers),
        averaged=means.averaged,
        same=means.same,
        newest=tuple(sorted(means.newest)),
        not_finite=tuple(sorted(means.not_finite)),
    )


def last_checkpoints(run: Path, count: int, *, until: int | None = None) -> list[Path]:
    """The newest `count` complete checkpoints of a run, the oldest first.

    Args:
        until: the last update that counts; None for the newest there is.
    """
    if not run.is_dir():
        raise ArgumentError(f"there is no run `{run}`; give the folder of a run.", field="run")
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


class _Means:
    def __init__(self, readers: Sequence[CheckpointReader]) -> None:
        self._readers = readers  # the newest is the last
        self._made: dict[int, Tensor] = {}
        self.averaged = 0
        self.same = 0
        self.newest: set[str] = set()
        self.not_finite: set[str] = set()

    def check_alike(self, part: str) -> None:
        newest = self._readers[-1]
        other = _described(newest.state[part])
        for reader in self._readers:
            one = _described(reader.state[part])
            faults = [
                f"`{name}` is {one.get(name, 'missing')} instead of {other.get(name, 'missing')}"
                for name in {**other, **one}
                if one.get(name) != other.get(name)
            ]
            if faults:
                raise CheckpointError(
                    f"the weights of `{reader.path}` are of another model than those of `{newest.path}`, so they have "
                    f"no mean: {first_of(faults, 5, '; ')}. Give checkpoints of one model."
                )

    def of_part(self, part: str) -> dict[str, Any]:
        held: dict[str, Any] = dict(self._readers[-1].state[part])
        for name, outline in held.items():
            if isinstance(outline, Tensor):
                if id(outline) not in self._made:  # tied tensors are one
                    self._made[id(outline)] = self._mean(part, name)
                held[name] = self._made[id(outline)]
        return held

    def _mean(self, part: str, name: str) -> Tensor:
        newest = _value(self._readers[-1], part, name)
        has_mean = newest.is_floating_point() or newest.is_complex()
        total = newest.to(torch.complex128 if newest.is_complex() else torch.float64, copy=True) if has_mean else newest
        is_same = True
        for reader in self._readers[:-1]:
            value = _value(reader, part, name)
            is_same = is_same and torch.equal(value, newest)
            if has_mean:
                total += value.to(total.dtype)
        is_finite = not has_mean or bool(total.isfinite().all())
        if is_same:
            self.same += 1
            self.not_finite |= set() if is_finite else {name}
            return newest
        if not has_mean:
            self.newest.add(name)
            return newest
        if not is_finite:
            raise CheckpointError(
                f"the mean of `{name}` is not finite; leave out checkpoints in which it is not.", field=name
            )
        self.averaged += 1
        return (total / len(self._readers)).to(newest.dtype)


def _described(tensors: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{format_name(one.dtype)} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
        for name, one in tensors.items()
    }


def _value(reader: CheckpointReader, part: str, name: str) -> Tensor:
    held = reader.state[part][name]
    return reader.read(held) if held.is_meta else held
