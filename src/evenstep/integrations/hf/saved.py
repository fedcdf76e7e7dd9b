"""A run's weights as the hub has models, written by `transformers`, or adapters by `peft`.

A folder appears whole under its name, or not at all.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import nn

from evenstep.checkpoint import ended_on_all
from evenstep.checkpoint.weights import FORMATS, ExportFormat, StoredWeights, converted, open_weights
from evenstep.errors import ArgumentError, CheckpointError, HookError, clause
from evenstep.events import Best, Hook, TrainEvent
from evenstep.events.hook import run_folder
from evenstep.files import replacing
from evenstep.integrations.hf.models import library
from evenstep.internals import unwrapped
from evenstep.internals.fsdp import class_before_sharding
from evenstep.train import load_weights


def save_pretrained(
    model: nn.Module,
    to: Path | str,
    *,
    weights: Path | str | StoredWeights,
    average: bool = False,
    dtype: ExportFormat | None = None,
    tokenizer: Path | str | None = None,
) -> list[Path]:
    """Write the weights of a run into the new folder `to`, as `from_pretrained` reads them; gives the files.

    Of a model with adapters of `peft` only these are written, as `PeftModel.from_pretrained` reads them.

    Args:
        model: built as it was for the run, on the CPU; it gets the weights, and `dtype`.
        weights: a run (its newest checkpoint), a checkpoint, or an average of several; of any strategy.
        average: take the average that the run has kept of its parameters.
        dtype: format of floating-point tensors; None keeps that of the model.
        tokenizer: a folder of this machine whose tokenizer is to be in `to` as well.
    """
    to = Path(to)
    if not hasattr(model, "save_pretrained"):
        raise ArgumentError(f"`model` must be one of transformers, but is a {type(model).__name__}.", field="model")
    if to.exists():
        raise ArgumentError(f"`{to}` exists already, and nothing in it was touched; give another name.", field="to")
    open_weights(weights, average=average).check_evaluated()
    load_weights(model, weights, average=average)
    if dtype is not None:
        for name, one in model.state_dict().items():
            converted(one, name, dtype)  # raises for values that the format can't hold
        model.to(FORMATS[dtype])
    try:
        with replacing(to) as new:
            cast("Any", model).save_pretrained(str(new))
            if tokenizer is not None:
                read = library("transformers").AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
                read.save_pretrained(str(new))
    except OSError as error:
        raise CheckpointError(f"`{to}` could not be written: {clause(error)}; nothing is left of it.") from error
    return sorted(to.iterdir())


@final
class SavePretrained(Hook):
    """Write the folder `pretrained` of the run folder when training ends: a model that `from_pretrained` reads.

    After an error it is not written. On several ranks the first writes it.

    Args:
        checkpoint: the "last" one, or the "best", which `checkpoint.best` keeps.
        average: take the average that the run keeps of its parameters (`ema`).
        dtype: format of floating-point tensors, "fp32", "bf16" or "fp16"; None: that of the checkpoint.
        tokenizer: a folder of this machine whose tokenizer is to be in it as well.
    """

    priority = 200  # after all hooks that ask for a checkpoint

    def __init__(
        self,
        *,
        checkpoint: Literal["last", "best"] = "last",
        average: bool = False,
        dtype: ExportFormat | None = None,
        tokenizer: Path | str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._options: dict[str, Any] = {"average": average, "dtype": dtype, "tokenizer": tokenizer}

    def before_train(self, event: TrainEvent) -> None:
        engine = self.trainer.engine
        if self._checkpoint == "best" and not any(isinstance(hook, Best) for hook in engine.bus.hooks):
            raise HookError(f"hook `{self.name}` needs `checkpoint.best`; set it.", field="checkpoint.best")
        if self._options["average"] and engine.parts.average is None:
            raise HookError(f"hook `{self.name}` writes the average, which needs `ema`; set it.", field="ema")
        run_folder(self)

    def after_train(self, event: TrainEvent) -> None:
        if event.error is None:
            folder, group = run_folder(self), self.trainer.engine.group
            job = ended_on_all(group, lambda: self._write(folder) if group.rank == 0 else None)
            group.first_rank_does(job.result)

    def _write(self, folder: Path) -> None:
        is_best = self._checkpoint == "best"
        weights = folder / "checkpoints" / (folder / "best").read_text().strip() if is_best else folder
        with replacing(folder / "pretrained") as new, torch.random.fork_rng(devices=[]):
            save_pretrained(_like(unwrapped(self.trainer.model)), new, weights=weights, **self._options)


def _like(model: nn.Module) -> nn.Module:
    """A model of the same class and config, with other weights."""
    live: Any = model
    if hasattr(live, "get_base_model"):  # a model of peft
        ((name, chosen),) = live.peft_config.items()
        return library("peft").get_peft_model(_like(live.get_base_model()), deepcopy(chosen), name)
    made = class_before_sharding(model)(deepcopy(live.config))
    if getattr(live, "generation_config", None) is not None:
        made.generation_config = deepcopy(live.generation_config)
    formats = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return made.to(torch.float64 if torch.float64 in formats else torch.float32)  # checkpoints of 16 bits have masters
