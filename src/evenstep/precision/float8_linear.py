"""Linear layers whose products torchao makes in float8: a layer is changed in place, by its class.

Parameters, names and hooks stay. This module imports torchao.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import (  # pyright: ignore[reportMissingImports] - an extra that checks do without
    Float8LinearConfig,
    convert_to_float8_training,
)

_OURS = "_float8"  # the attribute with the names of those that came with the class


def _converted(layer: nn.Linear, recipe: str, *, emulate: bool) -> nn.Module:
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        round_scales_to_power_of_2=True,
        pad_inner_dim=recipe != "rowwise_with_gw_hp",
    )
    return convert_to_float8_training(layer, config=config)


_Torchaos: Any = type(_converted(nn.Linear(16, 16, device="meta"), "tensorwise", emulate=True))


class Float8Linear(_Torchaos):
    """An `nn.Linear` in float8. Under autocast its input is cast on every device, and its products are not."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            return super().forward(input.to(torch.get_autocast_dtype(kind)))


def convert(layers: Iterable[nn.Linear], *, recipe: str, emulate: bool) -> None:
    """Convert layers to float8, in place."""
    for layer in layers:
        restore(layer)
        made, own = vars(_converted(layer, recipe, emulate=emulate)), vars(layer)
        added = [name for name in made if name not in own]
        own.update({name: made[name] for name in added}, **{_OURS: added})
        layer.__class__ = Float8Linear


def restore(layer: nn.Module) -> None:
    """Undo `convert` for one layer."""
    if type(layer) is Float8Linear:
        plain: Any = layer
        plain.__class__ = nn.Linear
        for name in vars(plain).pop(_OURS):
            del vars(plain)[name]
