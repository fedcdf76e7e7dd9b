"""A model as named layers and what flows between them: what a pipeline can cut.

A layer takes the outputs of its sources as positional arguments, and the task's inputs if it asks for them.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import ismethod
from itertools import pairwise
from typing import Any, Self, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError
from evenstep.internals import children_of, compiled_in_place, has_hooks
from evenstep.keys import key
from evenstep.tensors import named_parameters

Build: TypeAlias = nn.Module | Callable[[], nn.Module]


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model.

    Args:
        name: prefix of its parameters' names, dotted, such as `blocks.3`.
        build: module, or function that builds it.
        sources: names of earlier layers whose outputs are its arguments; by default the layer before.
        inputs: the task's inputs that follow: all (a tuple as positional, a dict as keyword arguments), these keys of a
            dict, or none. By default the first layer gets all.
    """

    name: str
    build: Build
    sources: tuple[str, ...] | None = None
    inputs: bool | tuple[str, ...] | None = None


@final
@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a model.

    Args:
        layers: layers in their order; the output of the last goes to the task's loss.
        ties: sets of names of one parameter, saved under the first. Parameters that modules share are found without it.
    """

    layers: tuple[Layer, ...]
    ties: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        for place, name in enumerate(names):
            is_begin = any(other.startswith(f"{name}.") for other in names)
            is_late = any(source >= place for source in self.sources(place))
            if names.count(name) > 1 or not all(name.split(".")) or is_begin or is_late:
                raise ArgumentError(
                    f"layer '{name}' must have a unique dotted name that begins no other, and sources before it; the "
                    f"layers are {', '.join(names)}."
                )

    def sources(self, place: int) -> tuple[int, ...]:
        """Places of the layers whose outputs the layer at `place` takes."""
        names = [layer.name for layer in self.layers]
        given = self.layers[place].sources
        if given is None:
            return (place - 1,) if place else ()
        return tuple(names.index(name) for name in given)

    def inputs(self, place: int) -> bool | tuple[str, ...]:
        """The task's inputs that the layer at `place` takes, as in `Layer`."""
        given = self.layers[place].inputs
        return place == 0 if given is None else given

    @classmethod
    def of(cls, model: "nn.Module | Layers | Sequence[Layer | Build]") -> Self:
        """The layers of a model with a method `layers()`, of an `nn.Sequential` with nested ones, or of a list.

        >>> [layer.name for layer in Layers.of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Tanh()))).layers]
        ['0', '1.0', '1.1']
        """
        if isinstance(model, cls):
            return model
        if ismethod(getattr(model, "layers", None)):  # in many models it is no method but a container
            return cls(tuple(cast("Any", model).layers()))
        if is_chain(model):
            return cls(tuple(_opened(cast("nn.Sequential", model), "")))
        if isinstance(model, nn.Module):
            raise ArgumentError(
                f"{type(model).__name__} can't be cut into stages; give it a method `layers()` that lists its layers, "
                f"or make it a plain `nn.Sequential`."
            )
        parts = cast("Sequence[Layer | Build]", model)
        return cls(
            tuple(part if isinstance(part, Layer) else Layer(str(place), part) for place, part in enumerate(parts))
        )


def built(layer: Layer, place: int, seed: int) -> nn.Module:
    """Module of the layer at `place`; each building function has its own seed."""
    if isinstance(layer.build, nn.Module):
        return layer.build
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, "layer", place))
        return layer.build()


def check_covered(model: object, layers: Layers) -> None:
    """Raise ArgumentError for parameters of a model that its `layers()` leave out: stages would train without them."""
    modules = [layer.build for layer in layers.layers if isinstance(layer.build, nn.Module)]
    if not isinstance(model, nn.Module) or len(modules) < len(layers.layers):
        return  # the parameters of a layer that a function builds are not known
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    own = named_parameters(model)
    left = [name for name, parameter in own.items() if id(parameter) not in held]
    if left and len(left) < len(own):
        raise ArgumentError(
            f"the layers of {type(model).__name__} must hold all its parameters, but `layers()` leaves out "
            f"{first_of([f'`{name}`' for name in left], 3)}; give each to the layer that uses it."
        )


def is_chain(model: object) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _opened(sequence: nn.Sequential, prefix: str) -> Iterator[Layer]:
    for name, child in children_of(sequence).items():
        if type(child) is nn.Sequential and len(child) and not has_hooks(child) and not compiled_in_place(child):
            yield from _opened(child, f"{prefix}{name}.")
        else:
            yield Layer(f"{prefix}{name}", child)


def arguments(outputs: Sequence[Any], inputs: Any, wanted: bool | tuple[str, ...]) -> tuple[tuple[Any, ...], Any]:
    """Positional and keyword arguments of a layer or a whole model: outputs of its sources, and the wanted inputs.

    >>> arguments([3], (4, 5), True), arguments([], {"a": 1, "b": 2}, ("b",)), arguments([], -1, True)
    (((3, 4, 5), {}), ((), {'b': 2}), ((-1,), {}))
    """
    if not wanted:
        return tuple(outputs), {}
    if wanted is True and isinstance(inputs, Tensor):  # asked first: it is the commonest
        return (*outputs, inputs), {}
    if isinstance(wanted, tuple):
        return tuple(outputs), {name: inputs[name] for name in wanted}
    if type(inputs) is tuple:
        return (*outputs, *cast("tuple[Any, ...]", inputs)), {}
    if isinstance(inputs, dict | UserDict):
        return tuple(outputs), cast("dict[str, Any]", inputs)
    return (*outputs, inputs), {}


def cut(layers: Layers, *, stages: int, split_at: Sequence[str] | None = None) -> tuple[range, ...]:
    """The places of each stage's layers.

    Args:
        split_at: names of the layers that begin the second and later stages; None: as equal in layers as can be.

    >>> cut(Layers.of(nn.Sequential(*[nn.ReLU() for _ in range(5)])), stages=2)
    (range(0, 2), range(2, 5))
    """
    names = [layer.name for layer in layers.layers]
    if split_at is None:
        if stages > len(names):
            raise ArgumentError(
                f"a model of {len(names)} layers can't be cut into {stages} stages: use fewer pipeline ranks or "
                f"stages per rank, or say its layers more finely."
            )
        edges = [len(names) * stage // stages for stage in range(stages + 1)]
    else:
        edges = [0, *(_begin(names, name) for name in split_at), len(names)]
        if len(edges) != stages + 1 or sorted(set(edges)) != edges:
            raise ArgumentError(
                f"`split_at` must name the first layers of stages 1 to {stages - 1}, in order, but names "
                f"{', '.join(split_at) or 'none'}; the layers are {', '.join(names)}.",
                field="split_at",
            )
    return tuple(range(begin, end) for begin, end in pairwise(edges))


def stages_per_rank_for(split_at: Sequence[str] | None, *, ranks: int) -> int | None:
    """Stages per rank of a model that is cut at these layers; None without cuts."""
    return None if split_at is None else -(-(len(split_at) + 1) // ranks)


def _begin(names: list[str], wanted: str) -> int:
    found = (place for place, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}."))
    return next(found, -1)


def flows(layers: Layers, stages: Sequence[range]) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each edge (source stage, destination stage) the places of the layers whose outputs it carries.

    >>> layers = Layers.of([Layer("a", nn.ReLU()), Layer("b", nn.ReLU()), Layer("c", nn.Bilinear, sources=("b", "a"))])
    >>> flows(layers, [range(0, 1), range(1, 2), range(2, 3)])
    {(0, 1): (0,), (0, 2): (0,), (1, 2): (1,)}
    """
    stage_of = {place: stage for stage, places in enumerate(stages) for place in places}
    carried: dict[tuple[int, int], set[int]] = {}
    for place, stage in stage_of.items():
        for source in layers.sources(place):
            if stage_of[source] != stage:
                carried.setdefault((stage_of[source], stage), set()).add(source)
    return {edge: tuple(sorted(places)) for edge, places in sorted(carried.items())}
