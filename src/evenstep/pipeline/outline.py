"""A model's modules without its tensors: what a rank keeps of the layers that others hold.

Modules are copied as they were given, before a strategy, a compiler or a number format changes those that are trained,
and all parameters and buffers of the layers are empty in the copy. So an outline costs next to no memory; `WholeModel`
puts tensors into it for a while. Layers that functions build are built when they are first wanted.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self, final

from torch import Tensor, nn

from evenstep.errors import clause
from evenstep.internals import unwrapped
from evenstep.names import named_tensors
from evenstep.pipeline.layers import Layer, Layers, built
from evenstep.pipeline.stage_module import StageModule, register


@final
class Outline:
    """The modules of a model without its tensors.

    Args:
        model: as it was given: a module, or only its layers.
        seed: of the layers that functions build.

    Attributes:
        unfit: why its layers have none, or "".
        unfit_as_given: why the module that was given has none, or "".
    """

    def __init__(self, model: object, layers: Layers, seed: int) -> None:
        self._seed = seed
        self._given: nn.Module | None = None
        self._layers = layers.layers
        self.unfit = self.unfit_as_given = ""
        given = model if isinstance(model, nn.Module) else None
        if given is not None and (fault := _not_made_of(given, layers)):
            self.unfit_as_given = f"`{type(given).__name__}.layers()` {fault}; let it give all of the model's modules"
            given = None
        try:
            self._given, self._layers = _without_tensors(given, layers.layers)
        except Exception as error:  # noqa: BLE001 - said where the copy is wanted; training needs none
            what = type(model).__name__ if isinstance(model, nn.Module) else "its layers"
            self._layers = ()
            self.unfit = self.unfit_as_given = (
                f"`copy.deepcopy` can't copy {what} ({clause(error)}); keep what can't be copied out of the model"
            )

    def drawn(self, layers: Layers) -> "tuple[nn.Module, LayersInTurn]":
        """Modules to put tensors into, others each time: the model, to be called as it was given, and its layers.

        Functions that build layers are called one after the other, and what they give is not kept.

        Args:
            layers: the names of the layers, and what flows between them.
        """
        given, kept = _without_tensors(self._given, self._layers)
        modules = [self._module(layer, place) for place, layer in enumerate(kept)]
        in_turn = LayersInTurn(layers, modules)
        if given is None:
            return in_turn, in_turn
        if type(given).forward is nn.Module.forward and "forward" not in vars(given):  # it only says its layers
            vars(given)["forward"] = in_turn.forward
        return given.eval(), in_turn

    def __deepcopy__(self, memo: object) -> Self:  # nothing in it ever changes
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What goes into a file with a model: functions that build layers stay where they are."""
        if all(isinstance(layer.build, nn.Module) for layer in self._layers):
            return vars(self)
        unfit = "it comes out of a file, which has none of the functions that build its layers; make another of these"
        return {**vars(self), "_given": None, "_layers": (), "unfit": unfit, "unfit_as_given": unfit}

    def _module(self, layer: Layer, place: int) -> nn.Module:
        if isinstance(layer.build, nn.Module):
            return layer.build
        _, (copy,) = _without_tensors(None, (replace(layer, build=built(layer, place, self._seed)),))
        assert isinstance(copy.build, nn.Module)
        return copy.build


@final
class LayersInTurn(nn.Module):
    """All layers of a model, called one after the other as stages call them, in evaluation mode.

    Attributes:
        modules_of: the layers by name.

    >>> chain = Layers.of([nn.Tanh(), nn.Linear(2, 1)])
    >>> list(LayersInTurn(chain, [layer.build for layer in chain.layers]).state_dict())
    ['1.weight', '1.bias']
    """

    def __init__(self, layers: Layers, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._last = len(modules) - 1
        self.modules_of = {layer.name: module for layer, module in zip(layers.layers, modules, strict=True)}
        stage = StageModule(layers, range(len(modules)), [self._last], modules)
        vars(self)["_stage"] = stage  # beside the layers, which have their names from the model
        for name, module in self.modules_of.items():
            register(self, name, module)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the last layer."""
        return vars(self)["_stage"]({}, kwargs or args)[self._last]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"the model was given as its layers, which can be called but have no `{name}`; give the model itself, "
                f"with a method `layers()`, for a task to call its methods."
            ) from error


def _not_made_of(model: nn.Module, layers: Layers) -> str:
    """What keeps a model from being made of its layers, or ""."""
    if not all(isinstance(layer.build, nn.Module) for layer in layers.layers):
        return "gives functions that build layers anew"
    held = {id(one) for layer in layers.layers for one in named_tensors(_module_of(layer)).values()}
    own = {id(one): name for name, one in named_tensors(model).items()}
    for name in (name for one, name in own.items() if one not in held):
        return f"gives no layer that holds the model's own `{name}`"
    return "" if held <= own.keys() else "gives layers that hold more than the model does"


def _without_tensors(model: nn.Module | None, layers: Sequence[Layer]) -> tuple[nn.Module | None, tuple[Layer, ...]]:
    """Copies of a model and its layers whose parameters and buffers are empty; functions are the same."""
    memo: dict[int, Any] = {}
    for layer in layers:
        if isinstance(layer.build, nn.Module):
            for one in (*layer.build.parameters(), *layer.build.buffers()):
                memo[id(one)] = _empty(one)
        else:
            memo[id(layer.build)] = layer.build
    given, copies = deepcopy((model, tuple(layers)), memo)
    return given, tuple(replace(one, build=_module_of(one)) for one in copies)


def _module_of(layer: Layer) -> Any:
    """A layer's module, as it was before it was compiled; or the function that builds it."""
    return unwrapped(layer.build) if isinstance(layer.build, nn.Module) else layer.build


def _empty(tensor: Tensor) -> Tensor:
    """A tensor of no elements that stands for another."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError(f"a tensor of class {type(tensor).__name__}")
    empty: Tensor = tensor.detach().new_empty(0)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty
