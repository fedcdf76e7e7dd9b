"""A run's weights as the hub has models: `config.json`, safetensors, and what else `from_pretrained` reads.

The libraries write their own layouts: `transformers` that of a model (tied weights once, large files cut), `peft` that
of adapters alone. What is written appears whole under its name, or not at all.
"""

from pathlib import Path
from typing import Any, cast

from torch import nn

from evenstep.arguments import require_word
from evenstep.checkpoint.export import FORMATS, ExportFormat, converted
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.errors import ArgumentError, CheckpointError, clause
from evenstep.files import replacing
from evenstep.hf.models import library
from evenstep.train import load_weights


def is_of_transformers(model: nn.Module) -> bool:
    return callable(getattr(model, "save_pretrained", None))


def save_pretrained(
    model: nn.Module,
    to: Path | str,
    *,
    weights: Path | str | StoredWeights,
    average: bool = False,
    dtype: ExportFormat | None = None,
    max_file_bytes: int | None = None,
    tokenizer: Path | str | None = None,
) -> list[Path]:
    """Write the weights of a run into the new folder `to`, as `from_pretrained` reads them; gives the files.

    Of a model with adapters of `peft` only these are written, as `PeftModel.from_pretrained` reads them.

    Args:
        model: built as it was for the run, on the CPU; it gets the weights, and `dtype`.
        weights: a run (whose newest checkpoint is taken), a checkpoint, or an average of several; of any strategy.
        average: whether to take the average that the run has kept of its parameters.
        dtype: the format of what is floating; None keeps that of the model.
        max_file_bytes: the most bytes of tensors in a file; None: what transformers does by itself.
        tokenizer: a folder of this machine whose tokenizer is to be in `to` as well.

    Raises:
        ArgumentError: a model that transformers has not made, or a folder that is there already.
        CheckpointError: weights that can't be read, that are not the model's, or that the format can't hold.
    """
    to = Path(to)
    if not is_of_transformers(model):
        raise ArgumentError(f"`model` must be one of transformers, but is a {type(model).__name__}.", field="model")
    check_options(dtype, tokenizer)
    if to.exists():
        raise ArgumentError(f"`{to}` exists already, and nothing in it was touched; give another name.")
    open_weights(weights, average=average).check_evaluated()
    load_weights(model, weights, average=average)
    if dtype is not None:
        _convert(model, dtype)
    options = {} if max_file_bytes is None else {"max_shard_size": max_file_bytes}
    try:
        with replacing(to) as new:
            cast("Any", model).save_pretrained(str(new), **options)
            if tokenizer is not None:
                read = library("transformers").AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
                read.save_pretrained(str(new))
    except OSError as error:
        raise CheckpointError(f"`{to}` could not be written: {clause(error)}; nothing is left of it.") from error
    return sorted(to.iterdir())


def check_options(dtype: object, tokenizer: Path | str | None) -> None:
    """Raise ArgumentError for a format that there is not, or a folder without a tokenizer."""
    if dtype is not None:
        require_word("dtype", dtype, FORMATS)
    if tokenizer is not None and not any(Path(tokenizer).glob("tokenizer*")):
        raise ArgumentError(f"`tokenizer` must be a folder with a tokenizer's files, but `{tokenizer}` has none.")


def _convert(model: nn.Module, dtype: str) -> None:
    for name, one in model.state_dict().items():
        converted(one, name, dtype)  # raises for what the format can't hold
    model.to(FORMATS[dtype])
