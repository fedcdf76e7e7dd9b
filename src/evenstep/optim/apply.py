"""Applies a finite gradient: g' = g / (divisor · max(1, (‖g/divisor‖₂ + 1e-6) / c)), then the optimizer's step.

Loss scale, late weight and clip coefficient are one deferred multiplier, which fused kernels apply themselves.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from evenstep.internals import foreach_divide, foreach_multiply, foreach_norms, local_tensor
from evenstep.optim.stepper import Stepper

CLIP_EPSILON = 1e-6
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max  # kernels take their scale as one; it grows while gradients are 0


Applied = tuple[float | Tensor, float | Tensor]
"""‖g‖₂ before clipping, divided by the divisor; 0.0 if the step was made, 1.0 if not, perhaps on the device."""


def gradients(parameters: Sequence[Tensor], *, sparse: bool = False) -> list[Tensor]:
    """Gradients of `parameters`, perhaps in shards, to be changed in place; of sparse ones the coalesced values."""
    if sparse:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.values() if grad.is_sparse else grad for grad in grads] if sparse else grads


def norms(grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """‖g‖₂ of each of `grads`, dense tensors on one device, in `dtype`; None for their own real format."""
    if not grads:
        return torch.zeros(0, dtype=dtype)
    if dtype is not None:
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.stack(foreach_norms(grads, dtype))


class Apply:
    """Takes the step of one update; reads the norm on the host before it: free on CPU, one wait on an accelerator.

    Attributes:
        reads_at_once: True if the host knows at once whether a step was made.
    """

    reads_at_once = True

    def __init__(self, stepper: Stepper, *, clip_norm: float | None) -> None:
        self.stepper = stepper
        self._clip_norm = clip_norm

    def __call__(self, grads: list[Tensor], squared: Tensor, divisor: float | Tensor, update: int = 0) -> Applied:
        """Take the step with g/divisor clipped, unless it is not finite.

        Args:
            squared: ‖g‖₂² over all parameters, stages and shards.
            divisor: loss scale × late weight.
        """
        divisor = float(divisor)
        norm = math.sqrt(float(squared)) / divisor if divisor else math.nan
        if not math.isfinite(norm):
            return norm, 1.0
        if self._clip_norm is not None:
            divisor *= max(1.0, (norm + CLIP_EPSILON) / self._clip_norm)
        scale: Tensor | None = None
        if divisor != 1.0:
            if divisor <= _LARGEST_FLOAT32 and self.stepper.divides_in_kernel:
                scale = torch.full((), divisor, device=squared.device)
            else:
                foreach_multiply([local_tensor(grad) for grad in grads], 1 / divisor)
        self.stepper.step(update, scale=scale)
        return norm, 0.0

    def resume(self, halted: Tensor | None = None) -> None:
        """Take steps again after an abort was handled, unless `halted` is 1: an earlier verdict on the device."""


@final
class DeviceApply(Apply):
    """Leaves the verdict on the device: the optimizer's kernel skips the step where the norm is not finite.

    The host reads it later. Until `resume`, every following step is skipped as well. The first step is decided by the
    host: torch 2.13's fused SGD leaves its momentum uninitialised when its kernel skips the step that makes it.
    """

    reads_at_once = False
    _is_first = True
    _halted: Tensor | None = None

    def __call__(self, grads: list[Tensor], squared: Tensor, divisor: float | Tensor, update: int = 0) -> Applied:
        norm = squared.sqrt() / divisor
        not_finite = (norm * 0).ne_(0).float()  # 0·inf and 0·NaN are NaN, which differs from 0
        aborted = not_finite if self._halted is None else torch.maximum(self._halted, not_finite)
        self._halted = aborted
        # a first step has the arithmetic of all others, since a resumed run has another first step
        if self._is_first and float(aborted):
            return norm, 1.0
        self._is_first = False
        scale = torch.ones_like(norm) * divisor
        if self._clip_norm is not None:
            scale = scale * ((norm + CLIP_EPSILON) / self._clip_norm).clamp(min=1.0)
        in_kernel = self.stepper.divides_in_kernel
        if not in_kernel:
            foreach_divide([local_tensor(grad) for grad in grads], scale)
        self.stepper.step(update, scale=scale.float() if in_kernel else None, found_inf=aborted)
        return norm, aborted

    def resume(self, halted: Tensor | None = None) -> None:
        self._halted = halted


def build_apply(stepper: Stepper, *, clip_norm: float | None, device: torch.device, defer: bool | None = None) -> Apply:
    """The way of applying that costs least; `defer` leaves the verdict on the device, by default an accelerator."""
    defer = device.type != "cpu" if defer is None else defer
    kind = DeviceApply if defer and stepper.takes_scale else Apply
    return kind(stepper, clip_norm=clip_norm)
