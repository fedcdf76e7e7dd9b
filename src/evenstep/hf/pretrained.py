"""At the end of a run its weights as the hub has them, in the run folder: what `from_pretrained` reads.

    pretrained/    the model of the last checkpoint, or of the best one, in transformers' layout, or peft's for adapters

The weights are read from the checkpoint, so any strategy will do, and nothing of the run changes. The folder is never
half written: what a run that went on writes takes the place of what was there.
"""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import nn

from evenstep.arguments import require_word
from evenstep.checkpoint.export import ExportFormat
from evenstep.errors import ArgumentError, HookError
from evenstep.events import Best, Hook, TrainBegin, TrainEnd
from evenstep.files import replacing
from evenstep.hf.models import library
from evenstep.hf.saving import check_options, is_of_transformers, save_pretrained
from evenstep.internals import unwrapped
from evenstep.internals.fsdp import class_before_sharding
from evenstep.optim.modes import has_modes
from evenstep.optim.multi import inner
from evenstep.tensors import state_of

_NAME = "pretrained"
_KINDS = ("last", "best")


@final
class SavePretrained(Hook):
    """Write the folder `pretrained` of the run folder when training ends: a model that `from_pretrained` reads.

    Not after an error, which leaves checkpoints to go on from. On several ranks the first writes it.

    Args:
        checkpoint: the "last" one, or the "best", which `checkpoint.best` (hook `Best`) keeps.
        average: whether to take the average that the run keeps of its parameters (`ema`).
        dtype: the format of what is floating, "fp32", "bf16" or "fp16"; None: that of the checkpoint.
        tokenizer: a folder of this machine whose tokenizer is to be in it as well.

    Raises:
        ArgumentError: an argument that can't be.

    >>> hook = SavePretrained(checkpoint="best", dtype="bf16")
    """

    priority = 200  # after all that asks for a checkpoint
    may_evaluate = False

    def __init__(
        self,
        *,
        checkpoint: Literal["last", "best"] = "last",
        average: bool = False,
        dtype: ExportFormat | None = None,
        tokenizer: Path | str | None = None,
    ) -> None:
        check_options(dtype, tokenizer)
        require_word("checkpoint", checkpoint, _KINDS)
        self._checkpoint, self._average, self._tokenizer = checkpoint, average, tokenizer
        self._dtype: ExportFormat | None = dtype

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError(f"hook `{self.name}` writes into the run folder; give the trainer a `folder`.")
        model = unwrapped(self.trainer.model)
        if not is_of_transformers(model):
            raise ArgumentError(f"hook `{self.name}` is for whole models of transformers; leave it out.")
        if self._average and not self.trainer.keeps_average:
            raise HookError(f"hook `{self.name}` writes the average, but the run keeps none; set `ema`.")
        if self._checkpoint == "best" and not any(isinstance(hook, Best) for hook in self.trainer.hooks):
            raise HookError(f"hook `{self.name}` writes the best checkpoint; set `checkpoint.best`.")
        self._check_built_again(model)
        if not self._average and any(has_modes(one) for one in inner(self.trainer.optimizer)):
            raise ArgumentError(
                f"hook `{self.name}` does not write what this optimizer evaluates; use `evenstep export`."
            )

    def _check_built_again(self, model: nn.Module) -> None:
        live: Any = model
        is_adapted = hasattr(live, "get_base_model")
        base: nn.Module = live.get_base_model() if is_adapted else model
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            again = _like(base)
        if not is_adapted and {*state_of(base)} != {*state_of(again)}:  # adapters stand in the base
            raise ArgumentError(
                f"hook `{self.name}` builds the model again from its config, which gives other parameters; "
                f"use `evenstep.hf.save_pretrained` after the run."
            )

    def after_train(self, event: TrainEnd) -> None:
        if event.error is None:
            self.trainer.first_rank_does(partial(self._write, cast("Path", self.trainer.folder)))

    def _write(self, folder: Path) -> None:
        weights: Path = folder
        if self._checkpoint == "best":
            if not (folder / "best").is_file():
                raise HookError(f"hook `{self.name}` finds no best checkpoint in `{folder}`.")
            weights = folder / "checkpoints" / (folder / "best").read_text().strip()
        with replacing(folder / _NAME) as new, torch.random.fork_rng(devices=[]):
            model = _like(unwrapped(self.trainer.model))
            save_pretrained(
                model, new, weights=weights, average=self._average, dtype=self._dtype, tokenizer=self._tokenizer
            )


def _like(model: nn.Module) -> nn.Module:
    live: Any = model
    if hasattr(live, "get_base_model"):  # a model of peft
        base = _like(live.get_base_model())
        (first, chosen), *others = live.peft_config.items()
        adapted = library("peft").get_peft_model(base, deepcopy(chosen), adapter_name=first)
        for name, chosen in others:
            adapted.add_adapter(name, deepcopy(chosen))
        return adapted
    made = class_before_sharding(model)(deepcopy(live.config))
    if getattr(live, "generation_config", None) is not None:
        made.generation_config = deepcopy(live.generation_config)
    formats = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return made.to(torch.float64 if torch.float64 in formats else torch.float32)  # in 16 bits, checkpoints have masters
