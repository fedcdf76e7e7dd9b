"""Number formats in which a model computes.

Gradients are not unscaled here: the loss scale is one factor of the update's deferred multiplier.

| name | model | products | masters | loss scale | bytes per parameter with Adam |
|---|---|---|---|---|---|
| 32-true | as it is | as they are | - | - | 16 |
| bf16-mixed | float32 | bfloat16 (autocast) | - | - | 16 |
| 16-mixed | float32 | float16 (autocast) | - | yes | 16 |
| bf16-true | bfloat16 | bfloat16 | float32 | - | 18 |
| 16-true | float16 | float16 | float32 | yes | 18 |
| bf16-true-no-master | bfloat16 | bfloat16 | none, rounded at random | - | 14 |
| 16-true-no-master | float16 | float16 | none, rounded at random | yes | 14 |
| float8-mixed | float32 | float8 in linear layers, else bfloat16 | - | - | 16 |
"""

from abc import ABC
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError, NonFiniteError
from evenstep.internals import buffers_of, parameters_of

Where = Literal["after-transfer", "before-transfer"]

_16_BITS = (torch.float16, torch.bfloat16)
_REAL = (torch.float32, torch.bfloat16, torch.float16)


class Precision(ABC):
    """A number format of computations; the defaults change nothing.

    Attributes:
        name: name in configurations.
        scale: factor of every loss before its backward.
        lowest_scale: lower limit of `scale`.
        retries_overflow: True if an update with inf or NaN gradients is tried again at a lower scale.
        format: number format of the model and its inputs; None leaves them unchanged.
        keeps_masters: True if the optimizer steps float32 weights, and the model has their rounded values.
        casts_before_transfer: True if batches are cast to `format` before their transfer to the device.
        float32_outputs: True if the model's outputs are cast to float32.
        layers: modules whose linear layers compute in another format: "none", "blocks" or a pattern.
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
        """Raise ArgumentError if `device` can't compute in this precision."""

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError for trained parameters, by name, in a format that rounds small updates to nothing."""
        for name, parameter in trained.items():
            if parameter.dtype in _16_BITS:
                raise ArgumentError(
                    f"trained parameters must be float32 or float64, but `{name}` is {format_name(parameter.dtype)}, "
                    f"in which small updates would round to nothing; use `model.float()` with "
                    f"`precision='bf16-mixed'`, or precision 'bf16-true', or "
                    f"`FullPrecision(bfloat16_parameters=True)`.",
                    field="precision",
                )

    def convert(self, model: nn.Module, held: Collection[int]) -> frozenset[int]:
        """Cast the model to the format of this precision, in place.

        Args:
            model: model on its device, not yet shared between ranks.
            held: `id`s of the parameters of the optimizer.

        Returns:
            `id`s of the parameters in `held` that have this format, or will have it when they have masters.
        """
        return frozenset()

    def convert_layers(self, layers: Iterable[nn.Linear]) -> None:
        """Let linear layers compute in the format of `layers`, in place, with unchanged parameters."""

    def computes_in(self, module: nn.Module) -> None:
        """Give a single module the formats of parameters and gradients during an update."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        return nullcontext()

    def committed(self) -> None:
        """Count a committed update, and perhaps raise the scale."""

    def overflowed(self) -> None:
        """Lower the scale after an overflow; NonFiniteError if there is no lower one."""

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values by name."""
        return {}

    @property
    def state(self) -> dict[str, float | int | None]:
        """The state to be saved, as a new dict."""
        return {}

    @state.setter
    def state(self, value: dict[str, float | int | None]) -> None:
        assert not value, "this precision has no state"


@final
class FullPrecision(Precision):
    """32-true: every tensor computes in the format it has; nothing is cast.

    Args:
        bfloat16_parameters: True trains bfloat16 parameters. Updates below 1/256 of a parameter are then lost, unless
            the optimizer keeps its own copies.

    >>> FullPrecision().name, FullPrecision().scale
    ('32-true', 1.0)
    """

    name = "32-true"

    def __init__(self, *, bfloat16_parameters: bool = False) -> None:
        self._bfloat16_parameters = bfloat16_parameters

    @property
    def settings(self) -> dict[str, Any]:
        return {"bfloat16_parameters": self._bfloat16_parameters}

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        meant = torch.bfloat16 if self._bfloat16_parameters else None
        super().check_trained({name: one for name, one in trained.items() if one.dtype != meant})


@final
class Bf16Mixed(Precision):
    """bf16-mixed: bfloat16 autocast.

    bfloat16 has the exponent range of float32, so no loss scale is needed. Reference: Kalamkar et al., "A study of
    BFLOAT16 for deep learning training", 2019.

    >>> Bf16Mixed().name
    'bf16-mixed'
    """

    name = "bf16-mixed"

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)


class LossScaled(Precision):
    """A precision with float16 gradients and a dynamic loss scale.

    float16 loses gradients below 6e-8, so the loss is multiplied by a scale that grows while nothing overflows and is
    halved at an overflow. Unlike with GradScaler, the *same* update is tried again at half the scale. Reference:
    Micikevicius et al., "Mixed precision training", ICLR 2018; tolerance and floor as in fairseq.

    Args:
        initial: first scale.
        growth_updates: committed updates without an overflow after which the scale is doubled.
        tolerance: share of tries since the last change of the scale whose overflow lowers it for one update only.
        floor: smallest scale; an overflow that would halve the scale below it stops the run.

    Attributes:
        instead: most similar precision without a scale.

    """

    retries_overflow = True
    instead: ClassVar[str]

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth_updates: int = 2000,
        tolerance: float = 0.0,
        floor: float = 1e-4,
    ) -> None:
        self._initial = float(initial)
        self._growth_updates = growth_updates
        self._tolerance = tolerance
        self.lowest_scale = floor
        self.scale = float(initial)
        self._scale_after: float | None = None  # the scale that a tolerated overflow has lowered for one update
        self._clean_updates = 0  # committed since the last overflow or change of the scale
        self._tries = 0  # since the last change of the scale
        self._overflows = 0

    def committed(self) -> None:
        self._tries += 1
        self._clean_updates += 1
        if self._scale_after is not None:
            self.scale = self._scale_after
            self._scale_after = None
        if self._clean_updates == self._growth_updates:
            self._change(self.scale * 2)

    def overflowed(self) -> None:
        lower = self.scale / 2
        if lower < self.lowest_scale:
            raise NonFiniteError(
                f"gradients overflow float16 even at a loss scale of {self.scale:g}, and half of it would be below "
                f"the floor of {self.lowest_scale:g}: the loss has most likely diverged. Lower the learning rate, clip "
                f"gradients, or train with precision '{self.instead}'."
            )
        self._tries += 1
        self._overflows += 1
        self._clean_updates = 0
        if self._overflows / self._tries < self._tolerance:
            self._scale_after = self.scale if self._scale_after is None else self._scale_after
            self.scale = lower
        else:
            self._change(lower)

    def _change(self, scale: float) -> None:
        self.scale = scale
        self._scale_after = None
        self._clean_updates = 0
        self._tries = 0
        self._overflows = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **super().settings,
            "initial": self._initial,
            "growth_updates": self._growth_updates,
            "tolerance": self._tolerance,
            "floor": self.lowest_scale,
        }

    @property
    def state(self) -> dict[str, float | int | None]:
        return {
            "scale": self.scale,
            "scale_after": self._scale_after,
            "clean_updates": self._clean_updates,
            "tries": self._tries,
            "overflows": self._overflows,
        }

    @state.setter
    def state(self, value: dict[str, float | int | None]) -> None:
        after = value["scale_after"]
        self.scale = float(value["scale"] or 0.0)
        self._scale_after = None if after is None else float(after)
        self._clean_updates = int(value["clean_updates"] or 0)
        self._tries = int(value["tries"] or 0)
        self._overflows = int(value["overflows"] or 0)


@final
class Fp16Mixed(LossScaled):
    """16-mixed: float16 autocast with a dynamic loss scale; arguments of `LossScaled`.

    >>> precision = Fp16Mixed(initial=4.0, growth_updates=2)
    >>> precision.overflowed(); precision.scale
    2.0
    >>> precision.committed(); precision.committed(); precision.scale
    4.0
    """

    name = "16-mixed"
    instead = "bf16-mixed"

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.float16)


class SixteenBits(Precision):
    """A precision with parameters, activations and gradients of 16 bits.

    Sums of gradients, the optimizer's step and losses are float32. *Master* weights in float32 are kept, and the model
    has their rounded values; or they are made for the step and rounded at random. Layers with running statistics stay
    float32, since small moves would be lost.

    Args:
        cast_inputs: "after-transfer" casts the output of `Task.inputs`. "before-transfer" casts all floating tensors of
            a batch, targets too, which halves the transfer.
        float32_outputs: True casts the model's outputs to float32 for `Task.postprocess` and `Task.loss`. Use False if
            the loss multiplies outputs with parameters.
    """

    def __init__(self, *, cast_inputs: Where = "after-transfer", float32_outputs: bool = True) -> None:
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
                raise ArgumentError(
                    f"with precision '{self.name}' trained parameters must be float32, or of 16 bits, but `{name}` is "
                    f"{format_name(parameter.dtype)}; make it float32, or use precision '32-true'.",
                    field="precision",
                )

    def convert(self, model: nn.Module, held: Collection[int]) -> frozenset[int]:
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


@final
class Bf16True(SixteenBits):
    """bf16-true: a bfloat16 model with float32 master weights and without a loss scale; arguments of `SixteenBits`.

    >>> Bf16True().name, Bf16True().scale
    ('bf16-true', 1.0)
    """

    name = "bf16-true"
    format = torch.bfloat16
    keeps_masters = True


@final
class Bf16NoMaster(SixteenBits):
    """bf16-true-no-master: a bfloat16 model, rounded stochastically; arguments of `SixteenBits`.

    Each float32 value is rounded up or down so that its mean is exact, keyed by (seed, update, parameter, element).
    Reference: Gupta et al., "Deep learning with limited numerical precision", ICML 2015.

    >>> Bf16NoMaster().name
    'bf16-true-no-master'
    """

    name = "bf16-true-no-master"
    format = torch.bfloat16


class ScaledSixteenBits(SixteenBits, LossScaled):
    """A precision whose model is float16, with a dynamic loss scale.

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


@final
class Fp16True(ScaledSixteenBits):
    """16-true: a float16 model with float32 master weights; arguments of `ScaledSixteenBits`.

    Numbers above 65504 are inf in float16, in forwards too.

    >>> Fp16True(initial=8.0).scale
    8.0
    """

    name = "16-true"
    instead = "bf16-true"
    keeps_masters = True


@final
class Fp16NoMaster(ScaledSixteenBits):
    """16-true-no-master: a float16 model, rounded stochastically; arguments of `ScaledSixteenBits`.

    >>> Fp16NoMaster(initial=8.0).scale
    8.0
    """

    name = "16-true-no-master"
    instead = "bf16-true-no-master"


def stays_float32(module: nn.Module) -> bool:
    """True for layers with running statistics, and for modules with `stays_float32 = True`.

    >>> stays_float32(nn.BatchNorm1d(3)), stays_float32(nn.LayerNorm(3))
    (True, False)
    """
    statistics = buffers_of(module).get("running_mean")
    return statistics is not None or getattr(module, "stays_float32", False) is True
