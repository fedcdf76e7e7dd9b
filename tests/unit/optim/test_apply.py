import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.optim.apply import build_apply, gradients, norms
from evenstep.optim.optimizers import joined
from evenstep.optim.stepper import Stepper


def squared_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    return norms(grads).square().sum()


CPU = torch.device("cpu")


def made(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return parameters


def expected(lr: float, divisor: float, clip: float | None) -> list[Tensor]:
    """g' = g/divisor · min(1, c/(‖g/divisor‖ + 1e-6)), then plain SGD, in float64."""
    parameters = made()
    grads = [p.grad.double() / divisor for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
    factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return [p.detach().double() - lr * factor * grad for p, grad in zip(parameters, grads, strict=True)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("defer", [False, True])
@given(st.floats(0.5, 65536.0), st.sampled_from([None, 0.1, 1.0, 1e6]))
@settings(max_examples=20, deadline=None)
def test_plain_sgd_gets_the_gradient_unscaled_and_clipped_exactly_once(
    fused: bool, defer: bool, divisor: float, clip: float | None
) -> None:
    parameters = made()
    optimizer = torch.optim.SGD(parameters, lr=0.5, fused=fused)
    grads = gradients(parameters)
    build_apply(Stepper(optimizer), clip_norm=clip, device=CPU, defer=defer)(grads, squared_norm(grads), divisor)
    for parameter, wanted in zip(parameters, expected(0.5, divisor, clip), strict=True):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("defer", [False, True])
def test_a_gradient_that_is_not_finite_is_never_applied(bad: float, defer: bool) -> None:
    parameters = made()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    assert parameters[1].grad is not None
    parameters[1].grad[2] = bad
    grads = gradients(parameters)
    applied = build_apply(Stepper(optimizer), clip_norm=1.0, device=CPU, defer=defer)(grads, squared_norm(grads), 1.0)
    assert float(applied.aborted) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


def test_after_an_abort_nothing_is_applied_until_the_host_has_answered() -> None:
    parameters = made()
    apply = build_apply(
        Stepper(torch.optim.SGD(parameters, lr=1.0, fused=True)), clip_norm=None, device=CPU, defer=True
    )

    def step(value: float) -> float:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        grads = gradients(parameters)
        return float(apply(grads, squared_norm(grads), 1.0).aborted)

    before = [parameter.detach().clone() for parameter in parameters]
    assert [step(math.nan), step(1.0)] == [1.0, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    apply.resume()
    assert step(1.0) == 0.0
    assert all(torch.equal(a, b - 1.0) for a, b in zip(parameters, before, strict=True))


def test_a_first_step_has_the_bits_of_a_later_step() -> None:
    """A verdict that stays on the device is read at the first step of each start."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator) for _ in range(4)]

    def trained(stops_after: int) -> Tensor:
        parameter = nn.Parameter(torch.zeros(64))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        apply = build_apply(Stepper(optimizer), clip_norm=0.3, device=CPU, defer=True)
        for number, value in enumerate(values):
            if number == stops_after:
                apply = build_apply(Stepper(optimizer), clip_norm=0.3, device=CPU, defer=True)
            parameter.grad = value.clone()
            apply(gradients([parameter]), squared_norm([value]), 3.0)
        return parameter.detach()

    for stops_after in (1, 2, 3):
        assert torch.equal(trained(stops_after), trained(4))


class OwnStep(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        look(self)
        super().step()


def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(("by", "defer"), [("step", False), ("hook", True), ("hook of one of several", False)])
def test_code_that_looks_at_gradients_before_the_kernel_gets_what_is_to_be_stepped(by: str, defer: bool) -> None:
    """By value, say: 0.01 in gradients that are still multiplied by a loss scale is not 0.01."""

    def stepped(fused: bool) -> list[Tensor]:
        parameters = made()
        kind = OwnStep if by == "step" else torch.optim.SGD
        optimizer: torch.optim.Optimizer = kind(parameters, lr=1.0, fused=fused)
        if by != "step":
            optimizer.register_step_pre_hook(look)
        if by == "hook of one of several":
            optimizer = joined((optimizer,))
        grads = gradients(parameters)
        build_apply(Stepper(optimizer), clip_norm=1.0, device=CPU, defer=defer)(grads, squared_norm(grads), 1024.0)
        return [parameter.detach() for parameter in parameters]

    for mine, wanted in zip(stepped(fused=True), stepped(fused=False), strict=True):
        torch.testing.assert_close(mine, wanted)
