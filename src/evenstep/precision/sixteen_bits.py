"""Modes in which the model itself is of 16 bits: its parameters, its activations and what comes back through it.

16 bits end where something is added up: gradients of micro-batches and ranks are summed in float32, the optimizer steps
in float32, and losses are computed in float32. What the optimizer steps is kept (*master* weights, of which the model
holds the rounded values), or made for the step and rounded back at random. Layers that keep running statistics stay
float32, since moves below 1/256 of a statistic would be lost. It is not autocast: nothing is cast per operation.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name, require_word
from evenstep.errors import ArgumentError
from evenstep.internals import buffers_of, parameters_of
from evenstep.precision.loss_scale import LossScaled
from evenstep.precision.precision import Precision

Where = Literal["after-transfer", "before-transfer"]

_REAL = (torch.float32, torch.bfloat16, torch.float16)


class SixteenBits(Precision):
    """A mode whose model is of 16 bits.

    Args:
        cast_inputs: where floating inputs become 16 bits. After the transfer, only what `Task.inputs` gives is cast.
            Before it, all floating tensors of a batch are, targets too, which halves what is transferred.
        float32_outputs: whether the model's outputs are cast to float32 for `Task.postprocess` and `Task.loss`; where
            the loss itself multiplies outputs with parameters, say False.

    Raises:
        ArgumentError: there is no such place to cast at.
    """

    def __init__(self, *, cast_inputs: Where = "after-transfer", float32_outputs: bool = True) -> None:
        require_word("cast_inputs", cast_inputs, get_args(Where))
        self.casts_before_transfer = cast_inputs == "before-transfer"
        self.float32_outputs = float32_outputs

    def computes_in(self, module: nn.Module) -> None:
        self.convert(module, ())
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32

    @property
    def settings(self) -> dict[str, Any]:
        cast_inputs = "before-transfer" if self.casts_before_transfer else "after-transfer"
        return {**super().settings, "cast_inputs": cast_inputs, "float32_outputs": self.float32_outputs}

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        for name, parameter in trained.items():
            if parameter.dtype not in _REAL:
                found = format_name(parameter.dtype)
                raise ArgumentError(
                    f"with precision '{self.name}' trained parameters must be float32, or of 16 bits, but `{name}` is "
                    f"{found}; make it float32, or train with precision '32-true', which leaves formats as they are."
                )

    def convert(self, model: nn.Module, held: Collection[int]) -> frozenset[int]:
        """Give the model this format, but for the parameters that get masters: those become float32 here."""
        rounded: set[int] = set()
        cast: dict[int, tuple[Tensor, Tensor]] = {}  # a buffer may stand in several places
        assert self.format is not None
        for module in model.modules():
            stays = stays_float32(module)
            format = torch.float32 if stays else self.format
            for parameter in parameters_of(module).values():
                if parameter is None or parameter.dtype not in _REAL:
                    continue
                is_rounded = id(parameter) in held and not stays
                parameter.data = parameter.data.to(torch.float32 if is_rounded and self.keeps_masters else format)
                if is_rounded:
                    parameter.grad_dtype = torch.float32
                    rounded.add(id(parameter))
            own = buffers_of(module)
            for name, buffer in own.items():
                if buffer is not None and buffer.dtype in _REAL:
                    _, own[name] = cast.setdefault(id(buffer), (buffer, buffer.to(format)))
        return frozenset(rounded)


class ScaledSixteenBits(SixteenBits, LossScaled):
    """A mode whose model is float16, with a dynamic loss scale.

    Args:
        cast_inputs, float32_outputs: as for `SixteenBits`.
        initial, growth_updates, tolerance, floor: of the loss scale, as for `LossScaled`.
    """

    format = torch.float16

    def __init__(
        self,
        *,
        cast_inputs: Where = "after-transfer",
        float32_outputs: bool = True,
        initial: float = 2.0**16,
        growth_updates: int = 2000,
        tolerance: float = 0.0,
        floor: float = 1e-4,
    ) -> None:
        SixteenBits.__init__(self, cast_inputs=cast_inputs, float32_outputs=float32_outputs)
        LossScaled.__init__(self, initial=initial, growth_updates=growth_updates, tolerance=tolerance, floor=floor)


def stays_float32(module: nn.Module) -> bool:
    """Whether a module's own parameters and buffers are float32, whatever the model's format is.

    Those of layers with running statistics are, and of a module that says `stays_float32 = True`.

    >>> stays_float32(nn.BatchNorm1d(3)), stays_float32(nn.LayerNorm(3))
    (True, False)
    """
    statistics = buffers_of(module).get("running_mean")
    return statistics is not None or getattr(module, "stays_float32", False) is True
