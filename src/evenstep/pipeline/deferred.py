"""Linear layers whose weight gradients can wait: what divides a backward into INPUT_BACKWARD and WEIGHT_BACKWARD.

For y = x Wᵀ + b with gradient g: first g W, later gᵀ x and Σg, by torch's own products, so the bits are equal.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.internals import adds_to_gradients, base_of, compiled_in_place, has_gradient_hooks, unwrapped
from evenstep.pipeline.compiled import is_compiled
from evenstep.tensors import gradient_format

Work = Callable[[], None]


@final
class Deferral:
    """Deferral of weight gradients; while `waiting` is a list, layers append what would add them to `.grad`."""

    waiting: list[Work] | None = None

    def end(self) -> list[Work]:
        waiting, self.waiting = self.waiting, None
        return waiting or []


def prepare(module: nn.Module, deferral: Deferral) -> None:
    """Make the linear layers of `module` ask `deferral` what to do with their weight gradients."""
    if is_compiled(module) or compiled_in_place(module) or unwrapped(module) is not module:
        return
    if type(module) is nn.Linear:
        module.__class__ = DeferredLinear
        object.__setattr__(module, "deferral", deferral)
    for child in module.children():
        prepare(child, deferral)


def _add(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
    for parameter, value in _weight_gradients(weight, bias, x, gradient):
        parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)


def _weight_gradients(
    weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor
) -> list[tuple[nn.Parameter, Tensor]]:
    found: list[tuple[nn.Parameter, Tensor]] = []
    if weight.requires_grad:
        found.append((weight, gradient.t().mm(x.conj()).to(gradient_format(weight))))
    if bias is not None and bias.requires_grad:
        found.append((bias, gradient.sum(0).to(gradient_format(bias))))
    return found


class DeferredLinear(nn.Linear):
    """An `nn.Linear` that `prepare` has changed in place: the same parameters, the same numbers."""

    deferral: Deferral

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, cast("nn.Parameter | None", self.bias)
        if not torch.is_grad_enabled() or not _may_wait(weight) or not (bias is None or _may_wait(bias)):
            return F.linear(input, weight, bias)
        product, shape = _Product.apply(input, weight, bias, self.deferral), (*input.shape[:-1], len(weight))
        return product if product.shape == shape else product.view(shape)


def _may_wait(parameter: Tensor) -> bool:
    return parameter.is_leaf and not has_gradient_hooks(parameter)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferral: Deferral) -> Tensor:
        casts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype is not torch.float64
        ctx.save_for_backward(x.to(torch.get_autocast_dtype(x.device.type)) if casts else x)
        # a checkpoint's recomputation gives back detached copies, and the gradient belongs to the parameters themselves
        ctx.weight, ctx.bias, ctx.deferral, ctx.dtype = weight, bias, deferral, x.dtype
        product = F.linear(x, weight, bias)
        # a view from a custom function may not be changed in place, as `nn.ReLU(inplace=True)` does
        return product if (base := base_of(product)) is None else base

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        weight, bias, deferral = ctx.weight, ctx.bias, ctx.deferral
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs = ctx.needs_input_grad
        of_input = None
        if needs[0]:
            of_input = rows.mm(weight.to(rows.dtype).conj()).view(x.shape).to(ctx.dtype)
        product = weight, bias, x.reshape(-1, x.shape[-1]), rows
        # a hook or a custom backward may go back through this layer alone, and then adds to no `.grad`
        adds = [node for node, needed in zip(ctx.next_functions[1:], needs[1:], strict=False) if needed]
        if deferral.waiting is not None and adds_to_gradients([node for node, _ in adds]):
            deferral.waiting.append(partial(_add, *product))
            return of_input, None, None, None
        now = dict(_weight_gradients(*product))
        return of_input, now.get(weight), None if bias is None else now.get(bias), None
