"""float8-mixed: linear layers multiply in float8, by torchao; parameters, gradients and checkpoints stay float32."""

import logging
from collections.abc import Iterable
from dataclasses import KW_ONLY, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.lazy import load_optional
from evenstep.precision.precision import Precision
from evenstep.schema import option

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

CAPABILITY = (8, 9)
"""The lowest compute capability whose tensor cores multiply float8."""

_ADDED = "_float8"  # attribute with the names of the attributes that torchao's class adds


@option
class Float8Mixed(Precision):
    """Linear layers in float8, the rest in bfloat16 autocast; needs the extra `float8`.

    Scales are powers of two: only values some 2¹⁵ times smaller than the largest of a tensor or row change.
    With "tensorwise" and "rowwise" this depends on the samples that share a micro-batch; with "rowwise_with_gw_hp" not.

    >>> Float8Mixed(recipe="tensorwise").layers
    'blocks'
    """

    name = "float8-mixed"
    autocast = torch.bfloat16

    _: KW_ONLY
    recipe: Recipe = "rowwise"
    """Granularity of the scales: one per tensor (fastest), one per row (more exact), or one per row with the gradients
    of weights in bfloat16 (most exact)."""
    layers: str = "blocks"
    """Modules whose linear layers are converted: `blocks` for the repeated blocks, or a pattern of names such as
    `encoder.layers.*`. The numbers of features must be multiples of 16."""
    emulate: bool = False
    """Make the same roundings in wider numbers, slowly, on any device. Otherwise an NVIDIA GPU of compute capability
    8.9 or more is needed."""

    def check(self, device: torch.device) -> None:
        is_nvidia = device.type == "cuda" and torch.version.cuda is not None
        if not self.emulate and (not is_nvidia or torch.cuda.get_device_capability(device) < CAPABILITY):
            raise ArgumentError(
                f"precision 'float8-mixed' needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, "
                f"Blackwell), but the device is '{device}'; use 'bf16-mixed', or set `emulate` to make the same "
                f"roundings slowly.",
                field="precision",
            )
        _torchao()

    def convert_layers(self, layers: Iterable[nn.Linear]) -> None:
        """Change the class of linear layers, in place; parameters, names and hooks stay."""
        config = replace(
            _torchao().Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=self.emulate,
            round_scales_to_power_of_2=True,
            pad_inner_dim=self.recipe != "rowwise_with_gw_hp",
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
    """Undo `Float8Mixed.convert_layers` for one layer."""
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
