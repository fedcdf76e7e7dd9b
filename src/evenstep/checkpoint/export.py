"""Weights of a run as a safetensors file for other programs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from evenstep import files
from evenstep.arguments import format_name, require_word
from evenstep.checkpoint.folders import disk_errors
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensor_file import SUFFIX, save
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.errors import ArgumentError, CheckpointError

ExportFormat = Literal["fp32", "bf16", "fp16"]
FORMATS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        require_word("dtype", dtype, FORMATS)
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
