"""Random keys for the layers of a whole model, equal to those of the same model in stages.

Each layer that may draw begins with randomness of its own, so the same model draws the same dropout whole, in stages,
and in a run that goes from the one to the other. Which layers there are the model says as to a pipeline; which of them
may draw is told by their classes: torch's that are known not to are left alone, as each key costs some microseconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from inspect import ismethod, signature
from typing import Any, cast, final

import torch
from torch import nn

from evenstep.internals import compiled_in_place, has_hooks, unwrapped
from evenstep.pipeline import Layer, Layers, PipelineModel
from evenstep.pipeline.layers import is_chain
from evenstep.train.randomness import Randomness

_QUIET = {
    f"torch.nn.modules.{name}"
    for name in (
        "activation",
        "batchnorm",
        "channelshuffle",
        "container",
        "conv",
        "flatten",
        "fold",
        "instancenorm",
        "linear",
        "normalization",
        "padding",
        "pixelshuffle",
        "pooling",
        "sparse",
        "upsampling",
    )
}
_LOUD = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def may_draw(module: nn.Module) -> bool:
    """True for modules that may draw random numbers: all but those made of torch's classes that never do.

    >>> may_draw(nn.Sequential(nn.Linear(1, 1), nn.ReLU())), may_draw(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
    (False, True)
    """
    parts: list[Any] = [*module.modules()]
    return any(type(part).__module__ not in _QUIET or isinstance(part, _LOUD) or has_hooks(part) for part in parts)


def key_layers(model: nn.Module, randomness: Randomness) -> None:
    """Let each layer of a whole model begin with its own key.

    Args:
        model: whose layers are known if it is an `nn.Sequential` or has a method `layers()`; others are keyed by
            micro-batch alone, and can't be put in stages.
    """
    if isinstance(model, PipelineModel):  # its stages say by themselves which layer begins
        randomness.by_layer = True
        return
    original = unwrapped(model)
    layers = layers_of(original)
    if not layers or original is not model or compiled_in_place(model):
        return
    parts = {id(part) for part in model.modules()}
    places: dict[int, list[int]] = {}
    modules: dict[int, nn.Module] = {}
    for place, layer in enumerate(layers):
        module = layer.build
        if not isinstance(module, nn.Module) or id(module) not in parts or _takes_no_hooks(module):
            continue
        if may_draw(module):
            modules[id(module)] = module
            places.setdefault(id(module), []).append(place)
    for key, module in modules.items():
        # before others' hooks, which may draw
        module.register_forward_pre_hook(_Begin(randomness, places[key]), prepend=True)
    randomness.by_layer = True


def in_order(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of tensors in the order of the layers, if they are known: that in which stages add up their norms.

    >>> in_order(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ["1.weight", "0.bias", "0.weight"])
    ['0.bias', '0.weight', '1.weight']
    """
    places = {layer.name: place for place, layer in enumerate(layers_of(model))}

    def place(name: str) -> int:
        above = name
        while above and above not in places:
            above = above.rpartition(".")[0]
        return places.get(above, len(places))

    return sorted(names, key=place)


@final
class _Begin:
    """Says that a layer begins; outside of a run's own passages it does nothing.

    Args:
        places: of the layer; several where one module without state stands in several places.
    """

    def __init__(self, randomness: Randomness, places: list[int]) -> None:
        self._randomness, self._places = randomness, places
        self._begun, self._calls = 0, dict[int, int]()

    def __reduce__(self) -> Any:
        return _Begin, (Randomness(), self._places)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not self._randomness.under_way:
            return
        if self._begun != self._randomness.begun:
            self._begun, self._calls = self._randomness.begun, {}
        self._randomness.begin_layer(self._places, self._calls)


def layers_of(model: nn.Module) -> Sequence[Layer]:
    """The layers that a pipeline would cut, or none."""
    if is_chain(model):
        return Layers.of(model).layers
    if isinstance(model, PipelineModel):
        return model.layers.layers
    says = getattr(model, "layers", None)
    if (
        not ismethod(says)
        or says.__self__ is not model
        or any(_is_needed(p) for p in signature(says).parameters.values())
    ):
        return ()
    with torch.random.fork_rng(devices=[]):  # it may build what it gives
        said = list(cast("Iterator[object]", says()))
    return [one for one in said if isinstance(one, Layer)] if all(isinstance(one, Layer) for one in said) else ()


def _takes_no_hooks(module: nn.Module) -> bool:
    return compiled_in_place(module) or isinstance(module, torch.jit.ScriptModule)


def _is_needed(parameter: Any) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )
