"""Models of `transformers` for run files, from settings or from a folder of this machine; nothing is fetched."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from evenstep.lazy import load_optional


def from_config(
    config: str | Mapping[str, Any],
    *,
    kind: str = "CausalLM",
    dtype: str = "float32",
    lora: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A model with random parameters, drawn from torch's generator.

    Args:
        config: settings, among them `model_type`; or a folder with a `config.json`.
        kind: one of transformers' classes `AutoModelFor…`, such as `CausalLM` or `SequenceClassification`.
        dtype: format of the parameters; the run's `precision` says in which formats it computes and steps.
        lora: options of `peft.LoraConfig`: the model is frozen, and adapters are trained; by default there are none.
        options: of the class's `from_config`, such as `attn_implementation="eager"`.
    """
    configs = library("transformers").AutoConfig
    is_folder = isinstance(config, str)
    settings = configs.from_pretrained(config, local_files_only=True) if is_folder else configs.for_model(**config)
    return _adapted(_class(kind).from_config(settings, dtype=getattr(torch, dtype), **options), lora)


def from_pretrained(
    path: str, *, kind: str = "CausalLM", dtype: str = "float32", lora: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """The model in a folder of this machine, in the hub's layout, in training mode.

    Args:
        path: the folder; a resume needs it again.
        kind, dtype, lora: see `from_config`.
        options: of the class's `from_pretrained`.
    """
    options = {"dtype": getattr(torch, dtype), "local_files_only": True, **options}
    return _adapted(_class(kind).from_pretrained(path, **options).train(), lora)


def library(name: str) -> Any:
    return load_optional(name, "hf")


def _class(kind: str) -> Any:
    return getattr(library("transformers"), f"AutoModelFor{kind}")


def _adapted(model: nn.Module, lora: Mapping[str, Any] | None) -> nn.Module:
    if lora is None:
        return model
    peft = library("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**lora))
