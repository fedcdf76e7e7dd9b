"""Weights by name out of files: a run's checkpoint, safetensors as the hub has them, or a file of `torch.save`.

    a run, a checkpoint, an average of checkpoints        its model, or the average that follows it
    X.safetensors, a folder with model.safetensors        the hub's layout, whole
    X.safetensors.index.json, a folder with one           … cut into several files
    any other file                                        `torch.load(weights_only=True)`: a dict of tensors, or one
                                                          that holds it as `state_dict`, `model` or the like

Nothing is executed, and of the first three no values are read before they are asked for. What the weights are for is
not known here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.damage import BadFileError, json_object
from evenstep.checkpoint.folders import (
    CHECKPOINTS,
    checkpoints_folder,
    complete_checkpoints,
    is_complete,
    named_by,
    said_of_unsaved,
)
from evenstep.checkpoint.reader import CheckpointReader
from evenstep.checkpoint.table import Table, TensorEntry
from evenstep.checkpoint.tensorfile import bytes_of, read_header
from evenstep.errors import ArgumentError, CheckpointError, clause
from evenstep.tensors import LEARNED, TASK_PARAMETERS, by_plain_name

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_OLDER = "pytorch_model.bin"
_HELD_AS = ("state_dict", "model", "model_state_dict", "weights", "module")


@final
class StoredWeights:
    """Named tensors in files.

    Args:
        source: where they are, for people.
        outlines: what each is, as a tensor of its shape and format whose values mean nothing; tied ones are one object.
        read: gives the values of one, on the CPU.
        verify: raises an UnreadableError if anything in the files is not as it was written, where that can be known.
        trained_by: the optimizer for which these are parameters to train, and not those that the run has evaluated.
    """

    def __init__(
        self,
        *,
        source: str,
        outlines: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        verify: Callable[[], None],
        trained_by: str = "",
    ) -> None:
        self.source, self.outlines, self.trained_by = source, outlines, trained_by
        self.read, self.verify = read, verify

    def behind(self, prefix: str) -> "StoredWeights":
        """The same, in which a name that begins with `prefix` is without it."""
        theirs = {name.removeprefix(prefix): name for name in self.outlines}
        return StoredWeights(
            source=self.source,
            outlines={name: self.outlines[own] for name, own in theirs.items()},
            read=lambda name: self.read(theirs[name]),
            verify=self.verify,
            trained_by=self.trained_by,
        )

    def check_evaluated(self) -> None:
        """Raise CheckpointError where the run has evaluated other parameters, so that others would be worse off."""
        if self.trained_by:
            raise CheckpointError(
                f"`{self.source}` holds the training weights of {self.trained_by}; `evenstep export RUN` makes those "
                f"that the run has evaluated."
            )


def open_weights(path: Path | str | StoredWeights, *, average: bool = False) -> StoredWeights:
    """The weights at `path`.

    Args:
        path: weights that are open already stay as they are.
        average: whether those of a run's average are meant instead of its model's.

    Raises:
        ArgumentError: it is no path, or an empty one, which would be the current folder.
        CheckpointError: there are none, or none that can be read.
    """
    if isinstance(path, StoredWeights):
        return path
    if not str(path):
        raise ArgumentError("`path` is empty; give a run, a checkpoint or a file of weights.", field="path")
    path = named_by(Path(path).expanduser())
    if is_complete(path) or (path.is_dir() and complete_checkpoints(checkpoints_folder(path))):
        return _of_checkpoint(path, average=average)
    if average and path.exists():
        raise CheckpointError(f"`{path}` is no run and no checkpoint, so it has no average; leave `average` out.")
    try:
        if path.is_dir():
            return _of_folder(path)
        if not path.exists():
            raise CheckpointError(f"`{path}` does not exist; give a run, a checkpoint, or a file of weights.")
        if path.name.endswith(INDEX_SUFFIX):
            return _of_index(path)
        return _of_file(path) if path.suffix == SUFFIX else _of_torch(path)
    except OSError as error:
        raise CheckpointError(f"`{error.filename or path}` cannot be read: {error.strerror}.") from error


def own_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    of_tasks = (*LEARNED, TASK_PARAMETERS)
    named = by_plain_name(state).items()
    return {name: one for name, one in named if isinstance(one, Tensor) and not name.startswith(of_tasks)}


def _of_checkpoint(path: Path, *, average: bool) -> StoredWeights:
    reader = CheckpointReader(path)
    reader.load(lambda _: True)
    model: dict[str, Any] = reader.state.get("model") or {}
    if not model:
        raise CheckpointError(f"`{reader.path}` has no weights of a model; give a checkpoint of a run.")
    held = own_weights(model)
    if average:
        held = _averages(reader, held)

    def read(name: str) -> Tensor:
        return reader.read(held[name]) if held[name].is_meta else held[name]

    trained_by = "" if average else str(reader.state.get("run", {}).get("trained_by", ""))
    return StoredWeights(source=str(reader.path), outlines=held, read=read, verify=reader.verify, trained_by=trained_by)


def _averages(reader: CheckpointReader, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    averages: dict[str, Tensor] = reader.state.get("ema") or {}
    if not averages:
        raise CheckpointError(
            f"`{reader.path}` has no average of the parameters, since the run kept none (`[ema]`); take its model's "
            f"weights, without `average`."
        )
    first = {id(one): averages[name] for name, one in model.items() if name in averages}
    return {name: averages.get(name, first.get(id(one), one)) for name, one in model.items()}


def _of_folder(folder: Path) -> StoredWeights:
    whole = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    cut = sorted(path for path in folder.iterdir() if path.name.endswith(INDEX_SUFFIX))
    if len(cut) == 1:
        return _of_index(cut[0])
    if len(whole) == 1 and not cut:
        return _of_file(whole[0])
    if not whole and not cut and (folder / _OLDER).exists():
        return _of_torch(folder / _OLDER)
    there = ", ".join(f"`{path.name}`" for path in (*whole, *cut)) or "none"
    raise CheckpointError(
        said_of_unsaved(folder)
        or f"`{folder}` is no run, no `{CHECKPOINTS}` folder and no folder with one set of weights: of safetensors "
        f"files it has {there}. Give the file itself, or the `{INDEX_SUFFIX}` that names several."
    )


def _of_index(path: Path) -> StoredWeights:
    try:
        places = json_object(path.read_bytes())["weight_map"]
    except (BadFileError, KeyError) as error:
        raise CheckpointError(f"`{path}` has no weight_map; give an index of several files.") from error
    return _of_files(path, cast("dict[str, str]", places))


def _of_file(path: Path) -> StoredWeights:
    return _of_headers(path, {name: (path, entry) for name, entry in _header(path, path.name).items()})


def _of_files(path: Path, places: Mapping[str, str]) -> StoredWeights:
    headers = {file: _header(path, file) for file in sorted({*places.values()})}
    for name, file in places.items():
        if name not in headers[file]:
            raise CheckpointError(f"`{path}` names `{name}`, which is not in `{file}`; fetch both again.")
    there = {name: file for file, header in headers.items() for name in header}
    return _of_headers(
        path, {name: (path.with_name(at), headers[at][name]) for name, at in {**there, **places}.items()}
    )


def _header(path: Path, name: str) -> Table:
    file = path.with_name(name)
    try:
        return read_header(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"`{path}` names `{name}`, which is not there; fetch it as well.") from error
    except BadFileError as error:
        raise CheckpointError(f"`{file}` {clause(str(error))}; give a whole safetensors file.") from error


def _of_headers(path: Path, table: Mapping[str, tuple[Path, TensorEntry]]) -> StoredWeights:
    plain = by_plain_name(table)
    outlines = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, (_, one) in plain.items()}
    return StoredWeights(
        source=str(path), outlines=outlines, read=lambda name: _values(*plain[name]), verify=lambda: None
    )


def _values(file: Path, entry: TensorEntry) -> Tensor:
    (piece,), values = entry.pieces, torch.empty(entry.shape, dtype=entry.dtype)
    with file.open("rb") as opened:
        opened.seek(piece.begin)
        if opened.readinto(bytes_of(values)) != piece.end - piece.begin:
            raise CheckpointError(f"`{file}` ended while it was read; it is damaged.")
    return values


def _of_torch(path: Path) -> StoredWeights:
    return _of_held(path, _tensors_of(path))


def _of_held(path: Path, tensors: Mapping[str, Tensor]) -> StoredWeights:
    held = by_plain_name(tensors)
    return StoredWeights(source=str(path), outlines=held, read=lambda name: held[name], verify=lambda: None)


def _tensors_of(path: Path) -> dict[str, Tensor]:
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"`{path}` can't be read: {clause(error)}.") from error
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


def index_of(files: Mapping[str, Sequence[str]], num_bytes: int) -> bytes:
    """The content of the index of weights that are cut into files: which tensor is in which."""
    places = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
