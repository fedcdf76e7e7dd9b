"""Causal models of transformers as layers, which a pipeline can cut."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast, final

from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import children_of, pytree, share_contents
from evenstep.pipeline import Layer, Layers


class _Names(NamedTuple):
    """Names of a model's parts in the order of their calls; `entry` is called right before the blocks."""

    trunk: str
    embedding: str
    entry: str
    blocks: str
    norm: str


_LLAMA = _Names("model", "embed_tokens", "rotary_emb", "layers", "norm")
_KNOWN: Mapping[str, _Names] = {
    "GPT2LMHeadModel": _Names("transformer", "wte", "wpe", "h", "ln_f"),
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _LLAMA),
}


def layers_of(model: nn.Module) -> Layers:
    """The layers of a causal model of transformers: embedding, blocks, norm and head, under their names in the model.

    Parameters are the model's own, so weights are loaded before, and checkpoints have the names of the whole model.
    Give the result to `PipelineModel`, and train it with `CausalLM()`.

    Args:
        model: GPT-2, Llama, Mistral, Qwen2 or Qwen3, with its head for language models.

    >>> from evenstep.integrations.hf import from_config
    >>> small = {"vocab_size": 8, "n_positions": 8, "n_embd": 4, "n_layer": 2, "n_head": 2}
    >>> [layer.name for layer in layers_of(from_config({"model_type": "gpt2", **small})).layers]
    ['transformer.wte', 'transformer.wpe', 'transformer.h.0', 'transformer.h.1', 'transformer.ln_f', 'lm_head']
    """
    names = _KNOWN.get(type(model).__name__)
    if names is None:
        raise ArgumentError(
            f"`layers_of` knows {', '.join(_KNOWN)}, but the model is a {type(model).__name__}; give it a method "
            f"`layers()`.",
            field="model",
        )
    trunk = model.get_submodule(names.trunk)

    def layer(name: str, call: Callable[..., Any], *, inputs: bool = False) -> Layer:
        return Layer(f"{names.trunk}.{name}", _Part(trunk.get_submodule(name), call), inputs=inputs)

    count = len(cast("nn.ModuleList", trunk.get_submodule(names.blocks)))
    return Layers(
        (
            layer(names.embedding, _embed, inputs=True),
            layer(names.entry, partial(_enter, *_shell_of(trunk, names, count))),
            *(layer(f"{names.blocks}.{number}", partial(_run_block, number)) for number in range(count)),
            layer(names.norm, _norm),
            Layer("lm_head", _Part(cast("nn.Module", model.lm_head), _give_scores)),
        )
    )


@final
class _Part(nn.Module):
    """A module with its parameters under their own names, called by `call(module, …)`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        share_contents(self, module)
        self.__dict__["_module"] = module  # not a child, which would change the names
        self.__dict__["_call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self.__dict__["_module"]
        module.training = self.training
        return self.__dict__["_call"](module, *args, **kwargs)


@final
class _Recorder(nn.Module):
    """Stands for a block, and keeps the arguments beside its input."""

    call: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = args, kwargs
        return hidden


def _shell_of(trunk: nn.Module, names: _Names, count: int) -> tuple[nn.Module, list[_Recorder]]:
    """The trunk with recorders in place of its blocks: its own code for positions, masks and dropout."""
    recorders = [_Recorder() for _ in range(count)]
    parts = {name: part for name, part in children_of(trunk).items() if name != names.embedding}
    shell = copy.copy(trunk)
    shell.__dict__["_modules"] = {**parts, names.blocks: nn.ModuleList(recorders), names.norm: nn.Identity()}
    return shell, recorders


def _embed(module: nn.Module, input_ids: Tensor, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    return module(input_ids), given


def _enter(
    shell: nn.Module, recorders: Sequence[_Recorder], module: nn.Module, embedded: tuple[Tensor, dict[str, Any]]
) -> dict[str, Any]:
    inputs, given = embedded
    shell.train(module.training)
    hidden = shell(inputs_embeds=inputs, **{**given, "use_cache": False}).last_hidden_state
    distinct: dict[tuple[int, ...], Any] = {}  # blocks with the same masks share them
    keys = [tuple(map(id, pytree.tree_leaves(one.call))) for one in recorders]
    for key, one in zip(keys, recorders, strict=True):
        distinct.setdefault(key, one.call)
        one.call = None
    places = {key: place for place, key in enumerate(distinct)}
    return {"hidden": hidden, "calls": list(distinct.values()), "call_of": [places[key] for key in keys]}


def _run_block(number: int, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    args, kwargs = state["calls"][state["call_of"][number]]
    return {**state, "hidden": module(state["hidden"], *args, **kwargs)}


def _norm(module: nn.Module, state: dict[str, Any]) -> Tensor:
    return module(state["hidden"])


def _give_scores(module: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    return {"logits": module(hidden)}
