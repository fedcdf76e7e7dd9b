"""Layers that are not for every run, and say so themselves, such as those that a hook changes between two updates.

A layer has `evenstep_not_for`: why it can't be in a run of a kind, by the kind. The core knows the kinds, not the
layers.
"""

from collections.abc import Mapping

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.options import Training
from evenstep.parallel import Local, Strategy
from evenstep.precision import Precision, SixteenBits


def check_layers(model: nn.Module, *, strategy: Strategy, precision: Precision, train: Training) -> None:
    """Raise ArgumentError for a layer that says that it is not for a run of this kind.

    The kinds are "local", "changing ranks", "16 bits" (of the parameters themselves) and "compile"; and "whole of
    stages", where tasks ask for the whole of a model in stages (`checks.tasks`).
    """
    holds_float32 = precision.keeps_masters and strategy.layout.divides == "elements"  # and rounds what it gathers
    kinds = {
        "local": isinstance(strategy, Local),
        "changing ranks": strategy.group.can_change,
        "16 bits": isinstance(precision, SixteenBits) and not holds_float32,
        "compile": train.compile != "off",
    }
    for name, module in model.named_modules():
        not_for: Mapping[str, str] = getattr(module, "evenstep_not_for", {})
        for kind in (kind for kind, is_so in kinds.items() if is_so and kind in not_for):
            raise ArgumentError(f"`{name}` is a {type(module).__name__}, {not_for[kind]}.")
