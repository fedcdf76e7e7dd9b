"""Keyed randomness: generators are seeded from (seed, u, k) for micro-batch k of update u, from (seed, u) for a step.

Where layers are known, each layer and the loss have keys below that, so a model draws the same whole and in stages.
"""

import random
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import Parameter, ismethod, signature
from typing import Any, cast, final
from zlib import crc32

import numpy as np
import torch
from torch import nn

from evenstep.internals import compiled_in_place, has_hooks, unwrapped
from evenstep.keys import branch_below, key_below
from evenstep.pipeline import Layer, Layers, PipelineModel
from evenstep.pipeline.layers import is_chain

LOSS = crc32(b"loss") | 1 << 40  # as `keys` takes the name "loss", without encoding it each time
_seed_cpu = torch.default_generator.manual_seed
_get_cpu = torch.default_generator.get_state
_set_cpu = torch.default_generator.set_state
_seed_of_cpu = torch.default_generator.initial_seed
_numpy: Any = np.random  # whose stubs lack two functions
_NEVER_RANDOM = {  # modules of torch's classes that get no key, as each costs microseconds
    f"torch.nn.modules.{kind}"
    for kind in (
        *("activation", "batchnorm", "channelshuffle", "container", "conv", "flatten", "fold", "instancenorm"),
        *("linear", "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling"),
    )
}
_RANDOM = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def seed_all(device: torch.device, number: int) -> None:
    """Seed the generators of torch (CPU and `device`), Python and numpy with a key."""
    _seed_cpu(number)  # `torch.manual_seed` also walks over all other backends, in 0.3 ms
    if device.type != "cpu":
        seed_device(device, number)
    random.seed(number)
    np.random.seed(number >> 31)  # other bits than Python's: both are Mersenne twisters


def seed_device(device: torch.device, number: int) -> None:
    """Seed the generator of an accelerator."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    else:
        torch.get_device_module(device).manual_seed(number)


@final
class Randomness:
    """The generators of one run.

    Attributes:
        by_layer: True where the layers are known, so that the loss has a key of its own.
        in_pass: True while layers of a micro-batch are called in the order of their keys.
    """

    def __init__(self, device: torch.device) -> None:
        self.by_layer = False
        self.in_pass = False
        self._device = device
        self._state = 0
        self._calls: dict[int, dict[int, int]] = {}  # numbers of a layer's calls, by the generator's seed before
        self._numpys: list[np.random.BitGenerator] = []  # of `undisturbed`, free to be used again

    def __reduce__(self) -> Any:  # a copy of a model, with its hooks, is no part of a run
        return Randomness, (self._device,)

    @contextmanager
    def undisturbed(self) -> Generator[None]:
        """Restore all generators at the end of the `with`."""
        torchs: AbstractContextManager[Any] = nullcontext()
        if self._device.type == "cuda":
            torchs = torch.random.fork_rng([self._device])
        # numpy's state takes 65 µs to read, and as long to write; another generator in its place takes 1 µs
        numpys = _numpy.get_bit_generator()
        mine = self._numpys.pop() if self._numpys else np.random.MT19937()
        _numpy.set_bit_generator(mine)
        python = random.getstate()
        cpu = _get_cpu()
        try:
            with torchs:
                yield
        finally:
            _set_cpu(cpu)
            random.setstate(python)
            _numpy.set_bit_generator(numpys)
            self._numpys.append(mine)

    @contextmanager
    def keyed(self, number: int) -> Generator[None]:
        """Generators seeded with the key `number`; their states are restored afterwards."""
        with self.unkeyed(), self.undisturbed():
            seed_all(self._device, number)
            yield

    @contextmanager
    def unkeyed(self) -> Generator[None]:
        """Layers that are called inside are not seeded, as their order has no keys."""
        outer = self.in_pass
        self.in_pass = False
        try:
            yield
        finally:
            self.in_pass = outer

    def begin(self, state: int) -> None:
        """A micro-batch begins; `state` is the branch of its keys."""
        self._state = state
        self.in_pass = True
        self._calls.clear()
        seed_all(self._device, key_below(state))

    def seed_layer(self, place: int) -> None:
        """A layer begins, by its place in the model, or the `LOSS`."""
        seed_all(self._device, key_below(self._state, place))

    def begin_layer(self, places: tuple[int, ...], module: nn.Module, inputs: Any) -> None:
        """A layer of a whole model begins: a hook.

        Each call in a micro-batch draws other numbers. A forward that is computed again in the backward is the same
        call: torch's generator then has the seed that it had before that.

        Args:
            places: of the layer in the model, one for each call of a forward.
        """
        if not self.in_pass:
            return
        calls = self._calls.setdefault(places[0], {})
        forward, call = divmod(calls.setdefault(_seed_of_cpu(), len(calls)), len(places))
        path = (places[call], forward) if forward else (places[call],)
        seed_all(self._device, key_below(self._state, *path))


def branch_of(state: int, index: int, path: tuple[int, ...]) -> int:
    """Branch of the keys of a micro-batch, or of a part of one, below that of its update."""
    return branch_below(state, index, "part", *path) if path else branch_below(state, index)


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
    places: dict[nn.Module, tuple[int, ...]] = {}
    for place, layer in enumerate(layers):
        module = layer.build
        if isinstance(module, nn.Module) and id(module) in parts and not compiled_in_place(module) and may_draw(module):
            places[module] = (*places.get(module, ()), place)  # a module without state may stand in several places
    for module, theirs in places.items():
        # before others' hooks, which may draw
        module.register_forward_pre_hook(partial(randomness.begin_layer, theirs), prepend=True)
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


def layers_of(model: nn.Module) -> Sequence[Layer]:
    """The layers that a pipeline would cut, or none."""
    model = unwrapped(model)
    if is_chain(model):
        return Layers.of(model).layers
    if isinstance(model, PipelineModel):
        return [Layer(name, nn.Identity) for name in model.names]
    method = getattr(model, "layers", None)
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(method).parameters.values() if ismethod(method) else ()
    if not ismethod(method) or any(one.default is Parameter.empty and one.kind not in kinds for one in parameters):
        return ()
    with torch.random.fork_rng(devices=[]):  # it may build the layers that it gives
        given = list(cast("Iterable[object]", method()))
    layers = [one for one in given if isinstance(one, Layer)]
    return layers if len(layers) == len(given) else ()
