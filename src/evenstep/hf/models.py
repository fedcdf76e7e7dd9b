"""Models of `transformers` for run files, which can give no object: from settings, or from a folder with weights.

Nothing is fetched: a path is a folder of this machine. Beside the model itself, adapters of `peft` are put in here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evenstep.arguments import advice, require_table, require_word
from evenstep.errors import ArgumentError
from evenstep.plugins import load_optional

if TYPE_CHECKING:
    from torch import nn

_FORMATS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def from_config(
    config: str | Mapping[str, Any],
    *,
    kind: str = "CausalLM",
    dtype: str = "float32",
    lora: Mapping[str, Any] | None = None,
    **options: Any,
) -> "nn.Module":
    """A model with random parameters, drawn from torch's generator.

    Args:
        config: settings, among them `model_type`; or a folder with a `config.json`.
        kind: which of transformers' classes `AutoModelFor…`, such as `CausalLM`, `Seq2SeqLM`,
            `SequenceClassification` or `TokenClassification`.
        dtype: of the parameters; in which formats is computed and stepped is the run's `precision`.
        lora: options of `peft.LoraConfig`: the model is frozen, and adapters are trained; by default there are none.
        options: of the class's `from_config`, such as `attn_implementation="eager"`.

    Raises:
        ArgumentError: there is no such class, format or folder.
        MissingExtraError: transformers or peft is not installed.
    """
    transformers = library("transformers")
    chosen = _class(transformers, kind)
    if isinstance(config, str):
        settings: Any = transformers.AutoConfig.from_pretrained(_folder(config), local_files_only=True)
    else:
        given = dict(require_table("config", config, '`config={"model_type": "llama", "hidden_size": 64}`'))
        if "model_type" not in given:
            raise ArgumentError('`config` must say its `model_type`, such as "llama", or be a folder; say it.')
        settings = transformers.AutoConfig.for_model(**given)
    return _adapted(chosen.from_config(settings, dtype=_format(dtype), **options), lora)


def from_pretrained(
    path: str, *, kind: str = "CausalLM", dtype: str = "float32", lora: Mapping[str, Any] | None = None, **options: Any
) -> "nn.Module":
    """The model in a folder of this machine, in the hub's layout, in training mode.

    Args:
        path: the folder; a run that goes on needs it again.
        kind, dtype, lora: see `from_config`.
        options: of the class's `from_pretrained`.

    Raises:
        ArgumentError: there is no such class, format or folder.
        MissingExtraError: transformers or peft is not installed.
    """
    transformers = library("transformers")
    chosen = _class(transformers, kind)
    model = chosen.from_pretrained(_folder(path), dtype=_format(dtype), local_files_only=True, **options)
    return _adapted(model.train(), lora)


def _adapted(model: "nn.Module", lora: Mapping[str, Any] | None) -> "nn.Module":
    if lora is None:
        return model
    options = dict(require_table("lora", lora, '`lora={"r": 8, "target_modules": ["q_proj", "v_proj"]}`'))
    peft = library("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def library(name: str) -> Any:
    """A library of the extra `hf`, imported when it is needed."""
    return load_optional(name, "hf")


def _class(transformers: Any, kind: str) -> Any:
    name = f"AutoModelFor{kind}"
    chosen = getattr(transformers, name, None)
    if chosen is None:
        # only now: its `dir` takes a tenth of a second
        known = [one.removeprefix("AutoModelFor") for one in dir(transformers) if one.startswith("AutoModelFor")]
        meant = advice(str(kind), known, f"such as {', '.join(known[:6])}.")
        raise ArgumentError(f"`kind` is {kind!r}, but transformers has no `{name}`; {meant}")
    return chosen


def _format(dtype: str) -> torch.dtype:
    require_word("dtype", dtype, _FORMATS)
    return _FORMATS[dtype]


def _folder(path: str) -> str:
    if not (Path(path) / "config.json").is_file():
        raise ArgumentError(
            f"`{path}` must be a folder of this machine with a `config.json`, as `save_pretrained` writes it, but "
            f"there is none; nothing is fetched from a hub here. Fetch it first (`hf download`), or correct the path."
        )
    return path
