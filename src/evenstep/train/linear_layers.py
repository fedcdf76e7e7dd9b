"""Choice of the linear layers that multiply in float8."""

from collections.abc import Mapping

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import pipeline_of
from evenstep.pipeline.deferred import DeferredLinear
from evenstep.precision import Float8Mixed, Precision
from evenstep.precision.float8 import is_converted, restore, why_not
from evenstep.tensors import plain
from evenstep.train.blocks import Chosen, choose_modules, chosen

_KEY = "float8.layers"


def choose_linear_layers(model: nn.Module, precision: Precision) -> Chosen:
    """The linear layers that `precision` changes, within the modules that its `layers` means; nothing is changed.

    Left as they are: those whose sizes the format can't have, and classes of one's own that come from `nn.Linear`.

    Raises:
        ArgumentError: there is none, on any rank of a pipeline, which ask together.
    """
    if not isinstance(precision, Float8Mixed):
        return Chosen({}, ())
    found = {
        plain(f"{above}.{name}".rstrip(".")): part
        for above, module in choose_modules(model, precision.layers, _KEY).here.items()
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }
    unfit = {name: why for name, part in found.items() if (why := _why_not(part))}
    result = chosen(model, {name: part for name, part in found.items() if name not in unfit})
    if not result.names:
        mine = [f"`{name}` {why}" for name, why in unfit.items()][:3]
        reasons = [one for theirs in pipeline_of(model).gather(mine) for one in theirs][:3]
        what = f"none of the linear layers there can compute so: {'; '.join(reasons)}"
        raise ArgumentError(
            f"`{_KEY}` is {precision.layers!r}, but {what if reasons else 'there are no linear layers'}; precision "
            f"'{precision.name}' needs layers of class `nn.Linear` whose features are multiples of 16: mean others by "
            f"a pattern of module names, or use 'bf16-mixed'."
        )
    return result


def convert_linear_layers(model: nn.Module, precision: Precision, here: Mapping[str, nn.Module]) -> None:
    """Change the chosen layers in place, and back what an engine before has changed of this model."""
    for module in model.modules():
        restore(module)
    if isinstance(precision, Float8Mixed):
        precision.convert_layers([layer for layer in here.values() if isinstance(layer, nn.Linear)])


def _why_not(layer: nn.Linear) -> str:
    kind = type(layer)
    if kind not in (nn.Linear, DeferredLinear) and not is_converted(layer):
        return f"is a {kind.__name__}"
    return why_not(layer)
