"""Weights of a run as safetensors files for other programs.

    model.safetensors                              in one file
    model-00001-of-00003.safetensors, …            or cut by size,
    model.safetensors.index.json                   with the file of each tensor

Of tied weights the first name is written, as `safetensors.torch.load_model` expects. Every byte of the checkpoint is
verified before a file gets its name, and the index gets its name last. Reference:
https://huggingface.co/docs/safetensors
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from evenstep import files
from evenstep.arguments import format_name, require_word
from evenstep.checkpoint.folders import disk_error
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensor_file import SUFFIX, save
from evenstep.checkpoint.weights import INDEX_SUFFIX, StoredWeights, open_weights
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
        path: a run (whose newest checkpoint is taken), a checkpoint, or anything else that `load_weights` takes.
        to: a new file that ends in `.safetensors`; its folder is made if need be.
        average: whether to take the average that a run has kept of its parameters.
        dtype: the format of floating tensors; None keeps the saved one.
        max_file_bytes: most bytes of tensors in a file; a larger tensor has a file of its own. None: no limit.

    Raises:
        ArgumentError: another suffix, an unknown format, or files that exist already.
        CheckpointError: weights that can't be read, that the format can't hold, or of an optimizer that evaluates
            others (a schedule-free one); no file is left then.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 1, {"model": {"bias": torch.ones(2)}})
    ...     [file.name for file in export_weights(run, Path(run) / "model.safetensors")]
    ['model.safetensors']
    """
    to = Path(to).expanduser()
    if dtype is not None:
        require_word("dtype", dtype, FORMATS)
    stem = to.name.removesuffix(SUFFIX)
    if stem in ("", to.name):
        raise ArgumentError(f"`to` must be a file that ends in `{SUFFIX}`, but is `{to}`.", field="to")
    weights = open_weights(path, average=average)
    weights.check_evaluated()
    first = {id(outline): name for name, outline in reversed([*weights.outlines.items()])}
    sizes = {
        name: _num_bytes(outline, dtype) for name, outline in weights.outlines.items() if first[id(outline)] == name
    }
    cuts = _cut(sizes, max_file_bytes)
    parts = [to.with_name(f"{stem}-{number:05d}-of-{len(cuts):05d}{SUFFIX}") for number in range(1, len(cuts) + 1)]
    held = dict(zip(parts if len(cuts) > 1 else [to], cuts, strict=True))
    index = to.with_name(f"{stem}{INDEX_SUFFIX}")
    for file in (to, index, *held):
        if file.exists():
            raise ArgumentError(f"`{file}` exists already; give another name.", field="to")
    written = [*held, *([index] if len(cuts) > 1 else [])]
    try:
        files.make_folder(to.parent)
        with ExitStack() as stack:  # renames in the reverse order: the index last
            new = {file: stack.enter_context(files.replacing(file)) for file in reversed(written)}
            for file, names in held.items():
                save(new[file], {name: converted(weights.read(name), name, dtype).contiguous() for name in names})
            weights.verify()
            if index in new:
                places = {name: file.name for file, names in held.items() for name in names}
                content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
                files.write(new[index], json.dumps(content, indent=2).encode() + b"\n")
    except BaseException as error:
        for file in written:  # none of them existed before
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(f"the weights could not be written to `{to.parent}`", error) from error
        raise
    return written


def _num_bytes(outline: Tensor, dtype: str | None) -> int:
    size = outline.element_size() if dtype is None or not outline.is_floating_point() else FORMATS[dtype].itemsize
    return outline.numel() * size


def _cut(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """Names in their order, in as few files as hold at most `largest` bytes each.

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


def converted(value: Tensor, name: str, dtype: str | None) -> Tensor:
    """The tensor `name` in another format, if it is floating."""
    if dtype is None or not value.is_floating_point():
        if value.dtype not in DTYPE_NAMES:
            advice = "give `dtype`" if value.is_floating_point() else "save it in another format"
            raise CheckpointError(
                f"`{name}` is {format_name(value.dtype)}, which safetensors files can't hold; {advice}.", field=name
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
