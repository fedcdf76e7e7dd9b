"""Linear layers whose products torchao makes in float8: a layer is changed in place, by its class.

So its parameters, its name, its hooks and all who hold it stay; optimizers, shards and averages see no difference. A
layer that is given back is an `nn.Linear` again. It loads torchao, so it is loaded where float8 is asked for only.
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
    """torchao's layer with the same parameters.

    Scales are powers of two, so that they round nothing; and what a weight gradient is summed over, the tokens of a
    micro-batch, is filled up to a multiple of 16 with zeros, which the kernels need.
    """
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
    """Let layers multiply in float8 from now on.

    Args:
        recipe: torchao's, by name.
        emulate: in wider numbers, on any device.
    """
    for layer in layers:
        restore(layer)
        made, own = vars(_converted(layer, recipe, emulate=emulate)), vars(layer)
        added = [name for name in made if name not in own]
        own.update({name: made[name] for name in added}, **{_OURS: added})
        layer.__class__ = Float8Linear


def restore(layer: nn.Module) -> None:
    """Make an `nn.Linear` again of a layer that was converted here; nothing else is changed."""
    if type(layer) is Float8Linear:
        plain: Any = layer
        plain.__class__ = nn.Linear
        for name in vars(plain).pop(_OURS):
            del vars(plain)[name]
