"""Linear layers that multiply in float8, by torchao; parameters, gradients and checkpoints stay float32."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.lazy import load_optional

CAPABILITY = (8, 9)
"""The lowest compute capability whose tensor cores multiply float8."""

_ADDED = "_float8"  # attribute with the names of the attributes that torchao's class adds


def check(device: torch.device, *, emulate: bool) -> None:
    """Raise ArgumentError if `device` can't multiply in float8."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    if not emulate and (not is_nvidia or torch.cuda.get_device_capability(device) < CAPABILITY):
        raise ArgumentError(
            f"precision 'float8-mixed' needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), "
            f"but the device is '{device}'; use 'bf16-mixed', or set `emulate`.",
            field="precision",
        )
    _torchao()


def convert(layers: Iterable[nn.Linear], recipe: str, *, emulate: bool) -> None:
    """Change the class of linear layers, in place."""
    config = replace(
        _torchao().Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        round_scales_to_power_of_2=True,
        pad_inner_dim=recipe != "rowwise_with_gw_hp",
    )
    for layer in layers:
        restore(layer)
        made = vars(_torchao().convert_to_float8_training(layer, config=config))
        added = {name: value for name, value in made.items() if name not in vars(layer)}
        vars(layer).update(added, **{_ADDED: list(added)})
        layer.__class__ = _linear_class()


def why_not(layer: nn.Linear) -> str:
    """Reason why a linear layer can't compute in float8, or "".

    >>> why_not(nn.Linear(32, 10)), why_not(nn.Linear(32, 16))
    ('has 32 → 10 features', '')
    """
    if layer.in_features % 16 or layer.out_features % 16:
        return f"has {layer.in_features} → {layer.out_features} features"
    is_taken = layer.weight.dtype in (torch.float32, torch.bfloat16)
    return "" if is_taken else f"is {format_name(layer.weight.dtype)}"


def is_converted(layer: nn.Module) -> bool:
    return _ADDED in vars(layer)


def restore(layer: nn.Module) -> None:
    """Undo `convert` for one layer."""
    if is_converted(layer):
        layer.__class__ = nn.Linear
        for name in vars(layer).pop(_ADDED):
            del vars(layer)[name]


def _torchao() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # it lists kernels of other devices
    try:
        return load_optional("torchao.float8", "float8", "torchao")
    finally:
        logging.disable(before)


@cache
def _linear_class() -> Any:
    base: Any = _torchao().float8_linear.Float8Linear

    class Float8Linear(base):
        """An `nn.Linear` in float8. Under autocast its input is cast on every device, and its products are not."""

        def forward(self, input: Tensor) -> Tensor:
            kind = input.device.type
            if not torch.is_autocast_enabled(kind):
                return super().forward(input)
            with torch.autocast(kind, enabled=False):
                return super().forward(input.to(torch.get_autocast_dtype(kind)))

    return Float8Linear
