"""Weights of a run as safetensors files that others read: one file, or several with the hub's index.

    model.safetensors                              all of it
    model-00001-of-00003.safetensors, …            … or cut where a file would be larger than asked for
    model.safetensors.index.json                   and what is in which

Of tied weights the first name is written, as `safetensors.torch.load_model` expects. Nothing else of the run goes
along. Every byte of the checkpoint is verified before a file gets its name, and the index gets its name last; where
anything fails, nothing is left. Reference: https://huggingface.co/docs/safetensors
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from evenstep.arguments import format_name, require_word
from evenstep.checkpoint import storage
from evenstep.checkpoint.folders import SAVING
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensorfile import TensorFile
from evenstep.checkpoint.weights import INDEX_SUFFIX, SUFFIX, StoredWeights, index_of, open_weights
from evenstep.checkpoint.writer import write_file
from evenstep.errors import ArgumentError, CheckpointError

ExportFormat = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_weights(
    path: Path | str | StoredWeights,
    to: Path | str,
    *,
    average: bool = False,
    dtype: ExportFormat | None = None,
    max_file_bytes: int | None = None,
) -> list[Path]:
    """Write the weights at `path` into the safetensors file `to`, or into several with an index; gives the files.

    Args:
        path: a run (whose newest checkpoint is taken), a checkpoint, or whatever else `load_weights` takes.
        to: a new file that ends in `.safetensors`; its folder is made if need be.
        average: whether to take the average that a run has kept of its parameters.
        dtype: the format of what is floating; None keeps what was saved.
        max_file_bytes: the most bytes of tensors in a file; a tensor that is larger has one to itself. None: no limit.

    Raises:
        ArgumentError: an argument that cannot be, or files that are there already.
        CheckpointError: weights that can't be read, that the format can't hold, or of an optimizer that evaluates
            others (a schedule-free one); no file is there then.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 1, {"model": {"bias": torch.ones(2)}})
    ...     [file.name for file in export_weights(run, Path(run) / "model.safetensors")]
    ['model.safetensors']
    """
    to = Path(to).expanduser()
    _check(to, dtype)
    weights = open_weights(path, average=average)
    weights.check_evaluated()
    names = _once(weights)
    sizes = {name: _bytes(weights.outlines[name], dtype) for name in names}
    cuts = _cut(sizes, max_file_bytes)
    files = [to] if len(cuts) == 1 else [_part(to, number, len(cuts)) for number in range(1, len(cuts) + 1)]
    index = to.with_name(f"{to.name.removesuffix(SUFFIX)}{INDEX_SUFFIX}")
    last = [] if len(cuts) == 1 else [index]
    there = [file for file in (to, index, *files) if file.exists()]
    if there:
        raise ArgumentError(f"`{there[0]}` exists already, and nothing in it was touched; give another name.")
    held = dict(zip(files, cuts, strict=True))
    contents = {file.name: names for file, names in held.items()}
    indices = {file: index_of(contents, sum(sizes.values())) for file in last}
    _write(weights, held, indices, dtype=dtype)
    return [*files, *last]


def _write(
    weights: StoredWeights,
    held: Mapping[Path, Sequence[str]],
    indices: Mapping[Path, bytes],
    *,
    dtype: str | None,
) -> None:
    folder = next(iter(held)).parent
    staged = {file: file.with_name(f"{SAVING}{file.name}") for file in (*held, *indices)}
    try:
        storage.make_folder(folder)
        for place in staged.values():
            place.unlink(missing_ok=True)  # of an export that was cut off
        for file, names in held.items():
            tensors = {name: converted(weights.read(name), name, dtype) for name in names}
            write_file(staged[file], TensorFile(tensors).chunks())
        weights.verify()
        for file, content in indices.items():
            write_file(staged[file], [content])
        for file, place in staged.items():
            storage.rename(place, file)
        storage.sync_folder(folder)
    except BaseException as error:
        for file, place in staged.items():  # none of them was there before
            place.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights could not be written to `{error.filename or folder}`: {error.strerror or error}; nothing "
                f"is left of them. Put them on another disk, or make room."
            ) from error
        raise


def _check(to: Path, dtype: str | None) -> None:
    if dtype is not None:
        require_word("dtype", dtype, FORMATS)
    if to.suffix != SUFFIX or to.name == SUFFIX:
        raise ArgumentError(
            f"`to` must be a file that ends in `{SUFFIX}`, but is `{to}`; write `model{SUFFIX}`.", field="to"
        )


def _once(weights: StoredWeights) -> list[str]:
    first: dict[int, str] = {}
    for name, outline in weights.outlines.items():
        first.setdefault(id(outline), name)
    return list(first.values())


def _bytes(outline: Tensor, dtype: str | None) -> int:
    size = outline.element_size() if dtype is None or not outline.is_floating_point() else FORMATS[dtype].itemsize
    return outline.numel() * size


def _cut(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """Names in their order, in as few files as hold at most so many bytes each.

    >>> _cut({"a": 3, "b": 3, "c": 9, "d": 1}, 6), _cut({"a": 3, "b": 3}, None)
    ([['a', 'b'], ['c'], ['d']], [['a', 'b']])
    """
    cuts: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if largest is not None and cuts[-1] and held + size > largest:
            cuts.append([])
            held = 0
        cuts[-1].append(name)
        held += size
    return cuts


def _part(to: Path, number: int, count: int) -> Path:
    """
    >>> _part(Path("a/model.safetensors"), 1, 3).name
    'model-00001-of-00003.safetensors'
    """
    return to.with_name(f"{to.name.removesuffix(SUFFIX)}-{number:05d}-of-{count:05d}{SUFFIX}")


def converted(value: Tensor, name: str, dtype: str | None) -> Tensor:
    """A tensor of this name in another format, if it is floating.

    Raises:
        CheckpointError: the format, or a safetensors file, can't hold it.
    """
    if dtype is None or not value.is_floating_point():
        if value.dtype not in DTYPE_NAMES:
            advice = "give `dtype`" if value.is_floating_point() else "keep it in another, or out of the `state_dict`"
            raise CheckpointError(
                f"`{name}` is {format_name(value.dtype)}, for which safetensors files have no name; {advice}.",
                field=name,
            )
        return value
    value = value if value.itemsize > 1 else value.float()  # kernels know little of formats of 8 bits
    narrow = value.to(FORMATS[dtype])
    if bool((narrow.isfinite() != value.isfinite()).any()):
        raise CheckpointError(
            f"`{name}` has values of up to {float(value.abs().max()):g}, which {dtype} can't hold; export in bf16 or "
            f"fp32.",
            field=name,
        )
    return narrow
