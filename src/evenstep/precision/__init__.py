"""Precisions: the number formats in which a model computes, as rows of a table.

Gradients are not unscaled here: the loss scale is one factor of the update's deferred multiplier.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError
from evenstep.internals import buffers_of, parameters_of
from evenstep.precision import float8
from evenstep.schema import Count, Positive, option

_NARROW = (torch.bfloat16, torch.float16)


@final
class LossScale:
    """Factor of every loss before its backward, doubled after `growth_updates` clean updates, halved at an overflow.

    float16 loses gradients below 6e-8. Unlike with GradScaler, the *same* update is tried again at half the scale.
    """

    def __init__(self, initial: float = 1.0, growth_updates: int | None = None, floor: float = 1.0) -> None:
        self.value = float(initial)
        self.floor = floor
        self._growth_updates = growth_updates
        self._clean_updates = 0  # committed since the last change of the scale

    def committed(self) -> None:
        """Count a committed update, and perhaps double the scale."""
        self._clean_updates += 1
        if self._clean_updates == self._growth_updates:
            self.value *= 2
            self._clean_updates = 0

    def halve(self) -> bool:
        """Halve the scale after an overflow; False where that would be below the floor."""
        if self.value / 2 < self.floor:
            return False
        self.value /= 2
        self._clean_updates = 0
        return True

    def state_dict(self) -> dict[str, float | int]:
        """The state to be saved; empty for a constant scale."""
        return {"scale": self.value, "clean_updates": self._clean_updates} if self._growth_updates else {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        if state:
            self.value = float(state["scale"])
            self._clean_updates = int(state["clean_updates"])


@option
class Precision:
    """A number format of computations; the defaults change nothing.

    Attributes:
        autocast: number format of autocast, or None.
        format: number format of the model and its inputs; None leaves them unchanged.
        output_format: number format of the model's outputs for the task; None leaves them unchanged.
        keeps_masters: True if the optimizer steps float32 weights, and the model has their rounded values.
        retries_overflow: True if an update with inf or NaN gradients is tried again at a lower loss scale.
    """

    name: ClassVar[str]
    autocast: ClassVar[torch.dtype | None] = None
    format: ClassVar[torch.dtype | None] = None
    keeps_masters: ClassVar[bool] = False
    retries_overflow: ClassVar[bool] = False
    output_format = None

    def build_loss_scale(self) -> LossScale:
        """The loss scale of a new run."""
        return LossScale()

    def check(self, device: torch.device) -> None:
        """Raise ArgumentError if `device` can't compute in this precision."""

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError for trained parameters, by name, in a format that rounds small updates to nothing."""
        for name, parameter in trained.items():
            if self.format is None and parameter.dtype in _NARROW:
                raise ArgumentError(
                    f"trained parameters must be float32 or float64, or small updates round to nothing, but `{name}` "
                    f"is {format_name(parameter.dtype)}; use precision 'bf16-true', or 'bf16-mixed' after "
                    f"`model.float()`.",
                    field="precision",
                )

    def convert(self, model: nn.Module, held: Collection[int]) -> frozenset[int]:
        """Cast the model to this format, in place; gives the `id`s of the parameters in `held` that have it then.

        Parameters with masters get the format later. `held` are `id`s of the parameters of the optimizer. Layers with
        running statistics stay float32, since small moves would be lost.
        """
        rounded: set[int] = set()
        for module in model.modules() if self.format is not None else ():
            stays = stays_float32(module)
            for one in (*parameters_of(module).values(), *buffers_of(module).values()):
                if one is None or one.dtype not in (torch.float32, *_NARROW):
                    continue
                is_rounded = id(one) in held and not stays
                one.data = one.data.to(torch.float32 if stays or (is_rounded and self.keeps_masters) else self.format)
                if is_rounded:
                    one.grad_dtype = torch.float32
                    rounded.add(id(one))
        return frozenset(rounded)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


def stays_float32(module: nn.Module) -> bool:
    """True for layers with running statistics, and for modules with `stays_float32 = True`.

    >>> stays_float32(nn.BatchNorm1d(3)), stays_float32(nn.LayerNorm(3))
    (True, False)
    """
    statistics = buffers_of(module).get("running_mean")
    return statistics is not None or getattr(module, "stays_float32", False) is True


@option
class FullPrecision(Precision):
    """32-true: every tensor computes in the format it has; nothing is cast."""

    name = "32-true"


@option
class LossScaled(Precision):
    """Base of precisions with float16 gradients and a dynamic `LossScale`."""

    retries_overflow = True

    initial: Positive = 2.0**16
    """The loss scale at the start of the run."""
    growth_updates: Count = 2000
    """Double the scale after this many updates in a row without an overflow."""
    floor: Positive = 1e-4
    """The smallest scale. A gradient that overflows even at this scale is a non-finite one."""

    def build_loss_scale(self) -> LossScale:
        return LossScale(self.initial, self.growth_updates, self.floor)


@option
class SixteenBits(Precision):
    """Base of precisions with parameters, activations and gradients of 16 bits; their sums and steps are float32."""

    float32_outputs: bool = True
    """Cast the model's outputs to float32 for `Task.loss`. Use false if the loss multiplies outputs with parameters."""

    @property
    def output_format(self) -> torch.dtype | None:
        return torch.float32 if self.float32_outputs else None


@option
class Bf16Mixed(Precision):
    """bf16-mixed: bfloat16 autocast, without a loss scale: bfloat16 has the exponent range of float32."""

    name = "bf16-mixed"
    autocast = torch.bfloat16


@option
class Fp16Mixed(LossScaled):
    """16-mixed: float16 autocast with a dynamic loss scale."""

    name = "16-mixed"
    autocast = torch.float16


@option
class Float8Mixed(Bf16Mixed):
    """Linear layers in float8, the rest in bfloat16 autocast; needs the extra `float8`.

    Scales are powers of two: only values some 2¹⁵ times smaller than the largest of a tensor or row change.
    With "tensorwise" and "rowwise" this depends on the samples that share a micro-batch; with "rowwise_with_gw_hp" not.
    """

    name = "float8-mixed"

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """Granularity of the scales: one per tensor (fastest), one per row (more exact), or one per row with the gradients
    of weights in bfloat16 (most exact)."""
    layers: str = "blocks"
    """Modules whose linear layers are converted: `blocks` for the repeated blocks, or a pattern of names such as
    `encoder.layers.*`. The numbers of features must be multiples of 16."""
    emulate: bool = False
    """Make the same roundings in wider numbers, slowly, on any device. Otherwise an NVIDIA GPU of compute capability
    8.9 or more is needed."""

    def check(self, device: torch.device) -> None:
        float8.check(device, emulate=self.emulate)

    def convert_layers(self, layers: Iterable[nn.Linear]) -> None:
        """Change the class of linear layers, in place; parameters, names and hooks stay."""
        float8.convert(layers, self.recipe, emulate=self.emulate)


@option
class Bf16NoMaster(SixteenBits):
    """bf16-true-no-master: a bfloat16 model, rounded stochastically (Gupta et al., 2015)."""

    name = "bf16-true-no-master"
    format = torch.bfloat16


@option
class Bf16True(Bf16NoMaster):
    """bf16-true: a bfloat16 model with float32 master weights and without a loss scale."""

    name = "bf16-true"
    keeps_masters = True


@option
class Fp16NoMaster(SixteenBits, LossScaled):
    """16-true-no-master: a float16 model, rounded stochastically."""

    name = "16-true-no-master"
    format = torch.float16


@option
class Fp16True(Fp16NoMaster):
    """16-true: a float16 model with float32 master weights; numbers above 65504 are inf, in forwards too."""

    name = "16-true"
    keeps_masters = True


PRECISIONS: Mapping[str, type[Precision]] = {
    kind.name: kind
    for kind in (FullPrecision, Bf16Mixed, Fp16Mixed, Float8Mixed, Bf16True, Fp16True, Bf16NoMaster, Fp16NoMaster)
}
"""Precisions by their name in run files."""
