"""The layers of one stage, as one module.

Parameters keep their names in the whole model. It tells which layer begins, so that the caller can seed it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

from torch import nn

from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import children_of, times_written, unwrapped
from evenstep.pipeline.boundary import tensors
from evenstep.pipeline.layers import Layers, arguments


@final
class StageModule(nn.Module):
    """The layers of one stage of a model.

    Args:
        places: of this stage's layers.
        leaving: places of those whose output goes to a later stage, and of the model's last layer if it is here. What
            an earlier stage gave may be among them: it is sent on.
        modules: of this stage's layers; a compiled one keeps the names of what it was compiled from.
    """

    def __init__(self, layers: Layers, places: range, leaving: Sequence[int], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.places = places
        self._leaving = tuple(leaving)
        self._sources = [layers.sources(place) for place in places]
        self._wanted = [layers.inputs(place) for place in places]
        self._calls: list[Callable[..., Any]] = [*modules]
        self._names = [layers.layers[place].name for place in places]
        self._layer_names = [layer.name for layer in layers.layers]
        last_use = {source: place for place in places for source in layers.sources(place)}
        self._done = [
            [source for source, last in last_use.items() if last == place and source not in self._leaving]
            for place in places
        ]
        later = {source for place in range(places.stop, len(layers.layers)) for source in layers.sources(place)}
        self._taken_later = [source for source in last_use if source not in places and source in later - {*leaving}]
        for place, module in zip(places, modules, strict=True):
            register(self, layers.layers[place].name, module)

    @property
    def takes_inputs(self) -> bool:
        """Whether a layer here is called with the task's inputs."""
        return any(self._wanted)

    def forward(
        self, received: Mapping[int, Any], inputs: Any, begin: Callable[[int], None] | None = None
    ) -> dict[int, Any]:
        """Run the layers.

        Args:
            received: outputs of earlier stages' layers, by place.
            inputs: the task's; only looked at by layers that ask for them.
            begin: called with a layer's place before it runs; None: nobody.

        Returns:
            The outputs that leave, by place.
        """
        values = dict(received)
        kept = [(source, received[source], _times(received[source])) for source in self._taken_later]
        for number, place in enumerate(self.places):
            if begin is not None:
                begin(place)
            outputs = [values[source] for source in self._sources[number]]
            for source in self._done[number]:
                del values[source]
            positional, named = arguments(outputs, inputs, self._wanted[number])
            values[place] = self._calls[number](*positional, **named)
            del outputs, positional
        for source, tree, times in kept:
            if _times(tree) != times:
                raise TaskError(
                    f"the output of layer '{self._layer_names[source]}' was changed in place in another stage, but a "
                    f"later stage takes it as well; write into a copy, or cut the model elsewhere (`split_at`)."
                )
        return {place: values[place] for place in self._leaving}

    @property
    def called(self) -> dict[str, nn.Module]:
        """The layers as they are called, a compiled one as what it was compiled to, by name."""
        return dict(zip(self._names, cast("list[nn.Module]", self._calls), strict=True))

    def compile_layers(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer by itself."""
        for called in self._calls:
            cast("nn.Module", called).compile(*args, **kwargs)


def _times(tree: Any) -> list[int]:
    return [0 if tensor.is_inference() else times_written(tensor) for tensor in tensors(tree)]


def register(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` a part of `root` under its dotted name.

    >>> root = nn.Module(); register(root, "blocks.0", nn.Linear(1, 1)); list(root.state_dict())
    ['blocks.0.weight', 'blocks.0.bias']
    """
    *above, last = name.split(".")
    parts = children_of(root)
    for part in above:
        parts = children_of(parts.setdefault(part, nn.Module()))
    if last in parts:
        raise ArgumentError(f"a layer can't be called '{name}', since a module has '{last}' already; rename it.")
    parts[last] = unwrapped(module)
