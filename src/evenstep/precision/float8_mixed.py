"""float8-mixed: bf16-mixed, with the matrix products of chosen linear layers in float8.

Parameters, gradients, optimizer state and checkpoints stay float32. References: Micikevicius et al., "FP8 formats for
deep learning", 2022; torchao's `float8`.
"""

import logging
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, final

import torch
from torch import nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.lazy import load_optional
from evenstep.precision.precision import Precision

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

CAPABILITY = (8, 9)
"""The lowest compute capability whose tensor cores multiply float8."""


@final
class Float8Mixed(Precision):
    """Linear layers in float8, the rest in bfloat16 autocast; needs the extra `float8`.

    Scales are powers of two, and change only values some 2¹⁵ times smaller than the largest of a tensor or row.
    With "tensorwise" and "rowwise" this depends on the samples that share a micro-batch; with "rowwise_with_gw_hp" not.

    Args:
        recipe: recipe of torchao: "tensorwise" (one scale per tensor, fastest), "rowwise" (one per row, more exact), or
            "rowwise_with_gw_hp" (and weight gradients in bfloat16, most exact).
        layers: modules whose linear layers are converted: "blocks" for the repeated blocks, or a pattern of
            names such as "encoder.layers.*". The numbers of features must be multiples of 16.
        emulate: True makes the same roundings in wider numbers, slowly, on any device. Otherwise an NVIDIA GPU of
            compute capability 8.9 or more is needed.

    >>> Float8Mixed(recipe="tensorwise").settings["layers"]
    'blocks'
    """

    name = "float8-mixed"

    def __init__(self, *, recipe: Recipe = "rowwise", layers: str = "blocks", emulate: bool = False) -> None:
        self._recipe = recipe
        self.layers = layers
        self._emulate = emulate

    @property
    def settings(self) -> dict[str, Any]:
        return {"recipe": self._recipe, "layers": self.layers, "emulate": self._emulate}

    def check(self, device: torch.device) -> None:
        if not self._emulate:
            _check_capability(device)
        _products()

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)

    def computes_in(self, module: nn.Module) -> None:
        inner = [part for part in module.modules() if part is not module]
        self.convert_layers(part for part in inner if type(part) is nn.Linear and not why_not(part))

    def convert_layers(self, layers: Iterable[nn.Linear]) -> None:
        _products().convert(layers, recipe=self._recipe, emulate=self._emulate)


def why_not(layer: nn.Linear) -> str:
    """Reason why a linear layer can't compute in float8, or "".

    >>> why_not(nn.Linear(32, 10)), why_not(nn.Linear(32, 16))
    ('has 32 → 10 features', '')
    """
    if layer.in_features % 16 or layer.out_features % 16:
        return f"has {layer.in_features} → {layer.out_features} features"
    if layer.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"is {format_name(layer.weight.dtype)}"
    return ""


def _check_capability(device: torch.device) -> None:
    if device.type != "cuda" or torch.version.cuda is None:
        found = f"the device is '{device.type}'"
    else:
        capability = torch.cuda.get_device_capability(device)
        if capability >= CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    raise ArgumentError(
        f"precision 'float8-mixed' needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), but "
        f"{found}; use 'bf16-mixed', or set `emulate` to true to make the same roundings slowly.",
        field="precision",
    )


def _products() -> Any:
    with _quiet("torchao", "torch.utils._pytree"):  # it says which of its kernels are for other devices
        return load_optional("evenstep.precision.float8_linear", "float8", "torchao")


@contextmanager
def _quiet(*names: str) -> Generator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
