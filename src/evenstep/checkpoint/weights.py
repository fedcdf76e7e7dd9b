"""Weights by name out of a run, a checkpoint, safetensors files or a file of `torch.save`, and into safetensors files.

Names are without the prefixes of wrappers such as `_orig_mod.`. Nothing is executed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from evenstep import files
from evenstep.arguments import choose, format_name
from evenstep.checkpoint.folders import checkpoints_folder, complete_checkpoints, disk_errors, is_complete, named_by
from evenstep.checkpoint.read import CheckpointReader
from evenstep.checkpoint.tensor_file import DTYPE_NAMES, SUFFIX, TensorFile, save
from evenstep.errors import ArgumentError, CheckpointError, clause
from evenstep.tensors import LEARNED, TASK_PARAMETERS, by_plain_name

ExportFormat = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX_SUFFIX = ".safetensors.index.json"
_HELD_AS = ("state_dict", "model", "model_state_dict", "weights", "module")
_AVERAGED, _COUNTER = "module.", "n_averaged"  # names of `torch.optim.swa_utils.AveragedModel`


@final
@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Named tensors in files.

    Args:
        source: their place, for people.
        outlines: by name, tensors of the same shape and dtype, without values; tied tensors are one object.
        read: gives the values of a tensor, on the CPU.
        verify: raises an UnreadableError for damage, where files have checksums.
        trained_by: the optimizer, if it evaluates other parameters than these.
    """

    source: str
    outlines: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    verify: Callable[[], None] = lambda: None
    trained_by: str = ""

    def behind(self, prefix: str) -> "StoredWeights":
        """The same weights, without `prefix` where a name begins with it."""
        stored = {name.removeprefix(prefix): name for name in self.outlines}

        def read(name: str) -> Tensor:
            return self.read(stored[name])

        return replace(self, outlines={name: self.outlines[own] for name, own in stored.items()}, read=read)

    def check_evaluated(self) -> None:
        """Raise CheckpointError if the run has evaluated other parameters than these."""
        if self.trained_by:
            raise CheckpointError(
                f"`{self.source}` holds the training weights of {self.trained_by}; use `evenstep export RUN` to get "
                f"the evaluation weights."
            )


def open_weights(path: Path | str | StoredWeights, *, average: bool = False) -> StoredWeights:
    """The weights at `path`, or a run's average of them; open ones are returned as they are.

    Args:
        path: a run, a checkpoint, a `.safetensors` file, an index of several, a folder with one of these, or a file of
            `torch.save`.
    """
    if isinstance(path, StoredWeights):
        return path
    if not str(path):
        raise ArgumentError("`path` is empty; give a run, a checkpoint or a file of weights.", field="path")
    path = named_by(Path(path).expanduser())
    if is_complete(path) or (path.is_dir() and complete_checkpoints(checkpoints_folder(path))):
        return _of_checkpoint(path, average=average)
    if average:
        raise CheckpointError(f"`{path}` is no run and no checkpoint, so it has no average; leave `average` out.")
    file = _in_folder(path) if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"`{path}` does not exist; give a run, a checkpoint, or a file of weights.")
    if file.name.endswith(INDEX_SUFFIX):
        tensors = _of_index(file)
    else:
        tensors = TensorFile(file).stored if file.suffix == SUFFIX else _of_torch(file)
    held = by_plain_name(tensors)
    if all(name == _COUNTER or name.startswith(_AVERAGED) for name in held):
        held.pop(_COUNTER, None)
    return StoredWeights(source=str(path), outlines=held, read=lambda name: held[name].clone())


def own_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a model's state by plain name, without tensors of tasks."""
    of_tasks = (*LEARNED, TASK_PARAMETERS)
    named = by_plain_name(state).items()
    return {name: one for name, one in named if isinstance(one, Tensor) and not name.startswith(of_tasks)}


def _of_checkpoint(path: Path, *, average: bool) -> StoredWeights:
    reader = CheckpointReader(path)
    reader.load(lambda _: True)
    held = own_weights(reader.state.get("model") or {})
    trained_by = "" if average else str(reader.state.get("run", {}).get("trained_by", ""))
    if average:
        averages: dict[str, Tensor] = reader.state.get("ema") or {}
        if not averages:
            raise CheckpointError(
                f"`{reader.path}` has no average, as the run kept none (`[train.ema]`); leave `average` out.",
                field="average",
            )
        tied = {id(one): averages[name] for name, one in held.items() if name in averages}
        held = {name: averages.get(name, tied.get(id(one), one)) for name, one in held.items()}

    def read(name: str) -> Tensor:
        return reader.read(held[name])

    return StoredWeights(source=str(reader.path), outlines=held, read=read, verify=reader.verify, trained_by=trained_by)


def _in_folder(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{INDEX_SUFFIX}")) or sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"`{path.name}`" for path in found) or "none"
    raise CheckpointError(
        f"`{folder}` must be a run with a complete checkpoint, or a folder with one file of weights, but has {there}; "
        f"give the file itself, or the `{INDEX_SUFFIX}` that names several."
    )


def _of_index(path: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        stored = {file: TensorFile(path.with_name(file)).stored for file in sorted({*places.values()})}
        return {name: stored[file][name] for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"`{path}` does not fit its files ({clause(error)}); fetch them again.") from error


def _of_torch(path: Path) -> dict[str, Tensor]:
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"`{path}` can't be read by `torch.load(weights_only=True)`: {clause(error)}; give a file of "
            f"`torch.save(model.state_dict(), …)`, or safetensors."
        ) from error
    found = _tensors_in(content)
    for name in _HELD_AS:
        if not found and isinstance(content, dict):
            found = _tensors_in(cast("dict[str, object]", content).get(name))
    if not found:
        raise CheckpointError(f"`{path}` must hold a dict of tensors by name; save `model.state_dict()`.")
    return found


def _tensors_in(content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    items = cast("Mapping[object, object]", content).items()
    found = {name: one.detach() for name, one in items if isinstance(name, str) and isinstance(one, Tensor)}
    return found if 2 * len(found) > len(content) else {}


def export_weights(
    path: Path | str | StoredWeights,
    to: Path | str,
    *,
    average: bool = False,
    dtype: ExportFormat | None = None,
) -> Path:
    """Write the weights at `path` into the new safetensors file `to`.

    Of tied weights the first name is written, as `safetensors.torch.load_model` expects.

    Args:
        path: a run (whose newest checkpoint is taken), a checkpoint, or anything else that `load_weights` takes.
        to: a file that ends in `.safetensors`; its folder is made if need be.
        average: whether to take the average that a run has kept of its parameters.
        dtype: the format of floating tensors; None keeps the saved one.
    """
    to = Path(to).expanduser()
    if dtype is not None:
        choose("dtype", dtype, FORMATS)
    if to.suffix != SUFFIX:
        raise ArgumentError(f"`to` must be a file that ends in `{SUFFIX}`, but is `{to}`.", field="to")
    if to.exists():
        raise ArgumentError(f"`{to}` exists already; give another name.", field="to")
    weights = open_weights(path, average=average)
    weights.check_evaluated()
    first = {id(outline): name for name, outline in reversed([*weights.outlines.items()])}
    names = [name for name, outline in weights.outlines.items() if first[id(outline)] == name]
    with disk_errors(f"the weights could not be written to `{to.parent}`"):
        files.make_folder(to.parent)
        with files.replacing(to) as new:
            save(new, {name: converted(weights.read(name), name, dtype).contiguous() for name in names})
            weights.verify()
    return to


def converted(value: Tensor, name: str, dtype: str | None) -> Tensor:
    """The tensor `name` in another format, if it is floating."""
    if dtype is None or not value.is_floating_point():
        if value.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"`{name}` is {format_name(value.dtype)}, which safetensors files can't hold; give `dtype`.", field=name
            )
        return value
    value = value if value.itemsize > 1 else value.float()  # kernels lack formats of 8 bits
    narrow = value.to(FORMATS[dtype])
    if bool((narrow.isfinite() != value.isfinite()).any()):
        raise CheckpointError(
            f"`{name}` has values of up to {float(value.abs().max()):g}, which {dtype} can't hold; export in bf16 or "
            f"fp32.",
            field=name,
        )
    return narrow
