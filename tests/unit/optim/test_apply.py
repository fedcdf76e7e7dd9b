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


def test_the_verdict_stays_on_the_device_only_for_optimizers_that_can_skip_a_step() -> None:
    parameters = made()
    fused, plain = torch.optim.SGD(parameters, fused=True), torch.optim.SGD(parameters)
    assert build_apply(Stepper(fused), clip_norm=None, device=CPU).reads_at_once
    assert not build_apply(Stepper(fused), clip_norm=None, device=CPU, defer=True).reads_at_once
    assert build_apply(Stepper(plain), clip_norm=None, device=CPU, defer=True).reads_at_once


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_first_step_has_the_bits_of_a_later_step(
    dtype: torch.dtype,
) -> None:
    """A verdict that stays on the device is read at the first step of each start."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, generator=generator, dtype=dtype) for _ in range(4)]

    def trained(stops_after: int) -> Tensor:
        parameter = nn.Parameter(torch.zeros(64, dtype=dtype))
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


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("by", ["step", "hook", "hook of one of several"])
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


def test_a_divisor_of_zero_is_not_finite() -> None:
    parameters = made()
    grads = gradients(parameters)
    for defer in (False, True):
        apply = build_apply(Stepper(torch.optim.SGD(parameters, fused=True)), clip_norm=None, device=CPU, defer=defer)
        assert float(apply(grads, squared_norm(grads), torch.tensor(0.0)).aborted) == 1.0


def test_sparse_gradients_are_coalesced_before_their_norm() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    grads = gradients([embedding.weight], sparse=True)
    assert float(squared_norm(grads)) == pytest.approx(8)  # row 1 is (2, 2), not (1, 1) twice


def test_float64_parameters_are_scaled_in_float64() -> None:
    parameters = made(torch.float64)
    grads = gradients(parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    wanted = [b - grad / 3.0 for b, grad in zip(before, [g.clone() for g in grads], strict=True)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    build_apply(Stepper(optimizer), clip_norm=None, device=CPU)(grads, squared_norm(grads), 3.0)
    for parameter, value in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_that_is_no_float32_leaves_a_step_of_gradients_that_are_0_as_it_is(fused: bool) -> None:
    """It doubles for as long as all are 0, and nothing overflows."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    optimizer = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.5, fused=fused)
    grads = [parameter.grad]
    build_apply(Stepper(optimizer), clip_norm=None, device=CPU)(grads, squared_norm(grads), 2.0**140)
    assert parameter.tolist() == [0.75] * 3
