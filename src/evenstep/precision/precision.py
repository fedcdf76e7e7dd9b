"""In which number formats a model computes: the seam, whose defaults do nothing.

A mode says in which format the model is and in which context its forward runs, by what the loss is multiplied before
its backward, and what it learns from an update that was committed or overflowed. Its state is one immutable value, so
that the loop can go back to an earlier one. It is not where gradients are unscaled: the scale is one factor of the
update's deferred multiplier.
"""

from abc import ABC
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.nothing import NOTHING

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Precision(ABC):
    """A precision mode.

    Attributes:
        name: the mode's name in configurations.
        scale: what every loss is multiplied by before its backward.
        lowest_scale: the smallest that `scale` ever becomes.
        retries_overflow: whether inf and NaN gradients may be this mode's own overflow, to be tried again.
        format: the number format of the model and of what goes into it; None leaves all as it is.
        keeps_masters: whether the optimizer steps float32 weights that are kept, of which the model has rounded values.
        casts_before_transfer: whether batches are cast to `format` before they are transferred to the device.
        float32_outputs: whether the model's outputs are cast to float32.
        layers: the modules whose linear layers compute in a format of their own: "none", "blocks" or a pattern.
    """

    name: ClassVar[str]
    format: ClassVar[torch.dtype | None] = None
    keeps_masters: ClassVar[bool] = False
    casts_before_transfer: bool = False
    float32_outputs: bool = False
    layers: str = "none"
    scale: float = 1.0
    lowest_scale: float = 1.0
    retries_overflow: bool = False

    def check(self, device: torch.device) -> None:
        """Raise ArgumentError when `device` can't compute in this mode."""

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError when parameters are in a format that small updates are lost in.

        A bfloat16 number has 8 bits: an update below 1/256 of a parameter rounds to nothing, and a float16 one below
        1/2048. Parameters that are not trained may have any format.

        Args:
            trained: parameters by name.
        """
        for name, parameter in trained.items():
            if parameter.dtype in _SIXTEEN_BITS:
                raise ArgumentError(_refusal(name, format_name(parameter.dtype), trained))

    def convert(self, model: nn.Module, held: Collection[int]) -> frozenset[int]:
        """Give the model the format that it has in this mode, in place.

        Args:
            model: on its device, not yet shared between ranks.
            held: the `id`s of the parameters that the optimizer holds.

        Returns:
            The `id`s of those of them that are of this format, or become so when they have masters.
        """
        return frozenset()

    def convert_layers(self, layers: Iterable[nn.Linear]) -> None:
        """Let linear layers compute in the format that `layers` is about, in place; their parameters stay."""

    def computes_in(self, module: nn.Module) -> None:
        """Give a module by itself the formats that it and its gradients have while an update computes with it."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        return NOTHING

    def committed(self) -> None:
        """An update was committed."""

    def overflowed(self) -> None:
        """An update was aborted because its gradients overflowed in this mode.

        Raises:
            NonFiniteError: there is nothing left to try.
        """

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, as plain values by name."""
        return {}

    @property
    def state(self) -> dict[str, float | int | None]:
        """What must be saved for the mode to go on exactly. A new dict each time."""
        return {}

    @state.setter
    def state(self, value: dict[str, float | int | None]) -> None:
        if value:
            raise ValueError(f"precision {self.name} has no state, but is given {sorted(value)}")


def _refusal(name: str, found: str, trained: Mapping[str, Tensor]) -> str:
    count = sum(parameter.dtype in _SIXTEEN_BITS for parameter in trained.values())
    digits = 256 if found == "bfloat16" else 2048
    meant = (
        " If they are meant to be trained so, as by an optimizer that keeps float32 copies of its own, say it: "
        "`precision=FullPrecision(bfloat16_parameters=True)`, in a script."
    )
    return (
        f"trained parameters must be float32 or float64, but {count} of {len(trained)} are of 16 bits, first `{name}` "
        f"in {found}: an update below 1/{digits} of a parameter would round to nothing. Keep float32 parameters "
        f'(`model.float()`, then build the optimizer) and compute in 16 bits with `precision="bf16-mixed"`, in a run '
        f"file `train.precision`; parameters that are frozen may stay as they are."
        f"{meant if found == 'bfloat16' else ''}"
    )
