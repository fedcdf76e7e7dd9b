"""Random keys for the layers of a whole model, so that it draws the same dropout whole and in stages.

The model gives its layers as to a pipeline. torch's classes that never draw get no key, as each costs microseconds.
"""

from collections.abc import Iterable, Sequence
from inspect import Parameter, ismethod, signature
from typing import Any, cast, final

import torch
from torch import nn

from evenstep.internals import compiled_in_place, has_hooks, unwrapped
from evenstep.pipeline import Layer, Layers, PipelineModel
from evenstep.pipeline.layers import is_chain
from evenstep.train.randomness import Randomness

_NEVER_RANDOM = {
    f"torch.nn.modules.{kind}"
    for kind in (
        *("activation", "batchnorm", "channelshuffle", "container", "conv", "flatten", "fold", "instancenorm"),
        *("linear", "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling"),
    )
}
_RANDOM = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def may_draw(module: nn.Module) -> bool:
    """True for modules that may draw random numbers: all but those made of torch's classes that never do.

    >>> may_draw(nn.Sequential(nn.Linear(1, 1), nn.ReLU())), may_draw(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
    (False, True)
    """
    parts: list[Any] = [*module.modules()]
    return any(
        type(part).__module__ not in _NEVER_RANDOM or isinstance(part, _RANDOM) or has_hooks(part) for part in parts
    )


def key_layers(model: nn.Module, randomness: Randomness) -> None:
    """Let each layer of a whole model begin with its own key.

    Args:
        model: layers are known of an `nn.Sequential`, and of a model with a method `layers()`; others are keyed by
            micro-batch alone, and can't be put in stages.
    """
    if isinstance(model, PipelineModel):  # its stages say by themselves which layer begins
        randomness.by_layer = True
        return
    layers = layers_of(model)
    if not layers or unwrapped(model) is not model or compiled_in_place(model):
        return
    parts = {id(part) for part in model.modules()}
    places: dict[nn.Module, list[int]] = {}
    for place, layer in enumerate(layers):
        module = layer.build
        if isinstance(module, nn.Module) and id(module) in parts and not compiled_in_place(module) and may_draw(module):
            places.setdefault(module, []).append(place)
    for module, theirs in places.items():
        # before others' hooks, which may draw
        module.register_forward_pre_hook(_Begin(randomness, theirs), prepend=True)
    randomness.by_layer = True


def in_order(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of tensors in the order of the layers, if they are known: the order in which stages add up their norms."""
    places = {layer.name: place for place, layer in enumerate(layers_of(model))}

    def place(name: str) -> int:
        above = name
        while above and above not in places:
            above = above.rpartition(".")[0]
        return places.get(above, len(places))

    return sorted(names, key=place)


@final
class _Begin:
    """Hook that seeds a layer in passes of a run.

    Args:
        places: of the layer; several where one module without state stands in several places.
    """

    def __init__(self, randomness: Randomness, places: list[int]) -> None:
        self._randomness = randomness
        self._places = places
        self._begun = 0
        self._calls = dict[int, int]()

    def __reduce__(self) -> Any:  # a copy of a model is no part of a run
        return _Begin, (Randomness(), self._places)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not self._randomness.in_pass:
            return
        if self._begun != self._randomness.begun:
            self._begun = self._randomness.begun
            self._calls = {}
        self._randomness.begin_layer(self._places, self._calls)


def layers_of(model: nn.Module) -> Sequence[Layer]:
    """The layers that a pipeline would cut, or none."""
    model = unwrapped(model)
    if is_chain(model):
        return Layers.of(model).layers
    if isinstance(model, PipelineModel):
        return model.layers.layers
    method = getattr(model, "layers", None)
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(method).parameters.values() if ismethod(method) else ()
    if not ismethod(method) or any(one.default is Parameter.empty and one.kind not in kinds for one in parameters):
        return ()
    with torch.random.fork_rng(devices=[]):  # it may build the layers that it gives
        given = list(cast("Iterable[object]", method()))
    layers = [one for one in given if isinstance(one, Layer)]
    return layers if len(layers) == len(given) else ()
