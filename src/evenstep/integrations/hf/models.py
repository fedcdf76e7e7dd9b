"""Models of `transformers` for run files, from settings or from a folder of this machine; nothing is fetched."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.errors import ArgumentError
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

    Raises:
        ArgumentError: there is no such class, format or folder.
    """
    if isinstance(config, str):
        settings = library("transformers").AutoConfig.from_pretrained(_folder(config), local_files_only=True)
    else:
        settings = library("transformers").AutoConfig.for_model(**config)
    return _adapted(_class(kind).from_config(settings, dtype=_format(dtype), **options), lora)


def from_pretrained(
    path: str, *, kind: str = "CausalLM", dtype: str = "float32", lora: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """The model in a folder of this machine, in the hub's layout, in training mode.

    Args:
        path: the folder; a resume needs it again.
        kind, dtype, lora: see `from_config`.
        options: of the class's `from_pretrained`.
    """
    options = {"dtype": _format(dtype), "local_files_only": True, **options}
    return _adapted(_class(kind).from_pretrained(_folder(path), **options).train(), lora)


def library(name: str) -> Any:
    return load_optional(name, "hf")


def _adapted(model: nn.Module, lora: Mapping[str, Any] | None) -> nn.Module:
    if lora is None:
        return model
    peft = library("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**lora))


def _class(kind: str) -> Any:
    chosen = getattr(library("transformers"), f"AutoModelFor{kind}", None)
    if chosen is None:
        raise ArgumentError(f"`kind` is {kind!r}, but transformers has no `AutoModelFor{kind}`.", field="kind")
    return chosen


def _format(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(
            f"`dtype` must be a number format of torch, such as 'bfloat16', but is {dtype!r}.", field="dtype"
        )
    return found


def _folder(path: str) -> str:
    if not (Path(path) / "config.json").is_file():
        raise ArgumentError(
            f"`{path}` must be a folder of this machine with a `config.json`; fetch it first.", field="path"
        )
    return path
