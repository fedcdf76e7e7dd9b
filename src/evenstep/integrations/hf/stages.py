"""Causal models of transformers as layers, which a pipeline can cut."""

import copy
from collections.abc import Mapping
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
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
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
    trunk = cast("Any", model.get_submodule(names.trunk))
    blocks = list(cast("nn.ModuleList", getattr(trunk, names.blocks)))
    prefix = names.trunk
    return Layers(
        (
            Layer(f"{prefix}.{names.embedding}", _Embedding(getattr(trunk, names.embedding)), inputs=True),
            Layer(f"{prefix}.{names.entry}", _Entry(trunk, names)),
            *(Layer(f"{prefix}.{names.blocks}.{number}", _Block(one, number)) for number, one in enumerate(blocks)),
            Layer(f"{prefix}.{names.norm}", _Norm(getattr(trunk, names.norm))),
            Layer("lm_head", _Head(cast("nn.Module", model.lm_head))),
        )
    )


class _View(nn.Module):
    """A module with its parameters under their own names, called in another way."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        share_contents(self, module)
        self.__dict__["_module"] = module  # not a child, which would change the names

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = cast("nn.Module", self.__dict__["_module"])
        module.training = self.training
        return module(*args, **kwargs)


@final
class _Embedding(_View):
    def forward(self, input_ids: Tensor, **given: Any) -> tuple[Tensor, dict[str, Any]]:
        return self._call(input_ids), given


@final
class _Entry(_View):
    """The trunk's own code before its blocks: positions, masks, dropout."""

    def __init__(self, trunk: Any, names: _Names) -> None:
        super().__init__(getattr(trunk, names.entry))
        calls = [_Recorder() for _ in getattr(trunk, names.blocks)]
        parts = {name: part for name, part in children_of(trunk).items() if name != names.embedding}
        shell = copy.copy(trunk)
        shell.__dict__["_modules"] = {**parts, names.blocks: nn.ModuleList(calls), names.norm: nn.Identity()}
        self.__dict__["_shell"] = shell
        self.__dict__["_calls"] = calls

    def forward(self, embedded: tuple[Tensor, dict[str, Any]]) -> dict[str, Any]:
        inputs, given = embedded
        shell = cast("nn.Module", self.__dict__["_shell"])
        shell.train(self.training)
        hidden = shell(inputs_embeds=inputs, **{**given, "use_cache": False}).last_hidden_state
        calls: list[_Recorder] = self.__dict__["_calls"]
        distinct: dict[tuple[int, ...], Any] = {}  # blocks with the same masks share them
        keys = [tuple(map(id, pytree.tree_leaves(one.call))) for one in calls]
        for key, one in zip(keys, calls, strict=True):
            distinct.setdefault(key, one.call)
        places = {key: place for place, key in enumerate(distinct)}
        state = {"hidden": hidden, "calls": list(distinct.values()), "call_of": [places[key] for key in keys]}
        for one in calls:
            one.call = None
        return state


@final
class _Recorder(nn.Module):
    """Stands for a block, and keeps the arguments beside its input."""

    call: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = args, kwargs
        return hidden


@final
class _Block(_View):
    def __init__(self, block: nn.Module, number: int) -> None:
        super().__init__(block)
        self._number = number

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = state["calls"][state["call_of"][self._number]]
        return {**state, "hidden": self._call(state["hidden"], *args, **kwargs)}


@final
class _Norm(_View):
    def forward(self, state: dict[str, Any]) -> Tensor:
        return self._call(state["hidden"])


@final
class _Head(_View):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self._call(hidden)}
