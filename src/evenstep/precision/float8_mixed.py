"""float8-mixed: bf16-mixed, with the matrix products of chosen linear layers in float8.

Input, weight and gradient of such a layer are scaled into the range of float8 (e4m3: 4 bits of mantissa with the hidden
one, e5m2: 3) each time they are multiplied, and products are summed in wider numbers: forwards and both products of the
backward take the tensor cores of 8 bits. Parameters, gradients, optimizer state and checkpoints stay float32. torchao
does it. References: Micikevicius et al., "FP8 formats for deep learning", 2022; torchao's `float8`. It is not a format
in which anything is kept, and what is not a linear layer is as in bf16-mixed.
"""

import logging
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, final

import torch
from torch import nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.plugins import load_optional
from evenstep.precision.precision import Precision

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

CAPABILITY = (8, 9)
"""The lowest compute capability whose tensor cores multiply float8."""


@final
class Float8Mixed(Precision):
    """Linear layers in float8, the rest in bfloat16 autocast; needs the extra `float8`.

    Scales are powers of two, so that how a tensor is scaled changes only those of its values that are some 2¹⁵ times
    smaller than its largest: with "tensorwise" those are found over a whole micro-batch, with "rowwise" over a token's
    row, and for the weight's gradient over one feature of all tokens of the micro-batch; with "rowwise_with_gw_hp"
    nothing of an update depends on which samples share a micro-batch.

    Args:
        recipe: torchao's: "tensorwise" (one scale per tensor, fastest), "rowwise" (one per row, more exact), or
            "rowwise_with_gw_hp" (and weight gradients in bfloat16, most exact).
        layers: of which modules the linear layers compute so: "blocks" for the repeated blocks of the model, which
            leaves embeddings and heads alone, or a pattern of module names such as "encoder.layers.*". Layers whose
            features are no multiples of 16 are left as they are.
        emulate: whether the same roundings are made in wider numbers, slowly, on any device: to try a run, or to test
            it. Without it an NVIDIA GPU of compute capability 8.9 or more is needed.

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
    """Why a linear layer can't compute in float8, or "".

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
