"""Optimizers that step parameters of 16 bits in float32: with master weights, and rounded stochastically."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import OutOfMemoryError
from evenstep.keys import branch
from evenstep.optim import rounded
from evenstep.optim.apply import build_apply, norms
from evenstep.optim.apply import gradients as gradients_of
from evenstep.optim.optimizers import joined, parts_of
from evenstep.optim.rounded import RoundedStepper, round_into
from evenstep.optim.stepper import MasterStepper, Stepper

CPU = torch.device("cpu")
FORMATS = (torch.bfloat16, torch.float16)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "several": lambda p: joined((torch.optim.Muon(p[:1], lr=0.02), torch.optim.AdamW(p[1:], lr=0.01))),
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), ())]


def gradients(update: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + update)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), ())]


def named(parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {f"p{number}": one for number, one in enumerate(parameters)}


def rounding(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> RoundedStepper:
    """Stepper of the parameters, which become 16 bits wide if they are not."""
    for one in parameters:
        one.data = one.data if one.dtype in FORMATS else one.data.bfloat16()
        one.grad_dtype = torch.float32
    names = {id(one): name for name, one in named(parameters).items()}
    return RoundedStepper(optimizer, names, seed=1, first_element=lambda tensor: 0)


def give(parameters: list[nn.Parameter], update: int) -> None:
    for one, gradient in zip(parameters, gradients(update), strict=True):
        one.grad = gradient


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_are_stepped_to_the_bit_as_float32_parameters_are(name: str, format: torch.dtype) -> None:
    plain, narrow = weights(), weights()
    wanted, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](narrow)
    stepper = MasterStepper(optimizer, named(narrow), format)
    for update in range(1, 6):
        for one, other, gradient in zip(plain, narrow, gradients(update), strict=True):
            one.grad, other.grad = gradient, gradient.clone()
        for part in parts_of(wanted):
            part.step()
        stepper.step(update)
    for number, (one, other) in enumerate(zip(plain, narrow, strict=True)):
        assert torch.equal(stepper.masters[f"p{number}"], one)
        assert other.dtype == format and torch.equal(other, one.detach().to(format))
        for key, value in wanted.state[one].items():
            assert torch.equal(torch.as_tensor(optimizer.state[other][key]), torch.as_tensor(value)), key
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == list(map(id, narrow))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_the_loss_scale_is_taken_out_once_with_plain_sgd(clip: float | None, fused: bool, masters: bool) -> None:
    """In fairseq's AMP it was taken out by the clip and by the step: SGD moved 1/128 of the way, and Adam hid it."""
    scale, weight = 128.0, nn.Parameter(torch.tensor([3.0, 4.0]))
    sgd = torch.optim.SGD([weight], lr=0.5, fused=fused)
    if masters:
        stepper: Any = MasterStepper(sgd, {"w": weight}, torch.float16)
    else:
        weight.data = weight.data.half()
        stepper = rounding(sgd, [weight])
    weight.grad = torch.tensor([0.75, 1.0]) * scale  # of norm 1.25
    apply = build_apply(stepper, clip_norm=clip, device=CPU)
    norm, _ = apply([weight.grad], weight.grad.square().sum(), scale, 1)
    share = 1.0 if clip is None else 0.5 / (1.25 + 1e-6)
    wanted = torch.tensor([3.0, 4.0], dtype=torch.float64) - 0.5 * share * torch.tensor([0.75, 1.0])
    assert norm == pytest.approx(1.25)
    torch.testing.assert_close(weight.double(), wanted.double(), rtol=2**-10, atol=0.0)


@pytest.mark.parametrize("format", FORMATS)
def test_updates_far_below_the_last_bit_add_up(format: torch.dtype) -> None:
    """250 steps of 2⁻¹² at 1: rounded to the nearest, each would be lost."""
    for masters in (True, False):
        weight = nn.Parameter(torch.ones(256))
        sgd = torch.optim.SGD([weight], lr=1.0)
        if masters:
            stepper: Any = MasterStepper(sgd, {"w": weight}, format)
        else:
            weight.data = weight.data.to(format)
            stepper = rounding(sgd, [weight])
        for update in range(1, 251):
            weight.grad = torch.full((256,), -(2.0**-12))
            stepper.step(update)
        mean = float(weight.detach().double().mean())
        assert mean == pytest.approx(1 + 250 * 2**-12, rel=4e-3)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "several"])
def test_stepping_in_pieces_gives_the_bits_of_stepping_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[list[Tensor]] = []
    for piece_bytes in (1, 1 << 20):
        monkeypatch.setattr(rounded, "PIECE_BYTES", piece_bytes)
        parameters = [nn.Parameter(one.detach().bfloat16()) for one in weights()]
        optimizer = OPTIMIZERS[name](parameters)
        stepper = rounding(optimizer, parameters)
        for update in range(1, 4):
            give(parameters, update)
            stepper.step(update)
        states = [value for one in parameters for value in optimizer.state[one].values() if isinstance(value, Tensor)]
        assert all(value.dtype == torch.float32 for value in states)
        results.append([*(one.detach() for one in parameters), *states])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class OutOfMemory(torch.optim.SGD):
    """Runs out of memory in its first steps, perhaps after it has changed a parameter."""

    failures = 0
    writes_before = False

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.failures:
            self.failures -= 1
            if self.writes_before:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(0)
            raise MemoryError("no room")
        super().step()


@pytest.mark.parametrize(("failures", "writes_before"), [(1, False), (2, False), (1, True)])
def test_a_step_that_ran_out_of_memory_is_taken_again_if_it_has_written_nothing(
    failures: int, writes_before: bool
) -> None:
    parameters = weights()
    optimizer = OutOfMemory(parameters, lr=1.0)
    optimizer.failures = failures
    optimizer.writes_before = writes_before
    for one in parameters:
        one.grad = one.detach().clone()
    if failures > 1 or writes_before:
        with pytest.raises(OutOfMemoryError):
            Stepper(optimizer).step(1)
    else:
        Stepper(optimizer).step(1)
        assert all(not one.any() for one in parameters)


def neighbours(value: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of the format at or below, and above, found from the nearest one in float64."""
    nearest = value.to(format)
    below = torch.where(
        nearest.double() > value.double(), torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest
    )
    return below, torch.nextafter(below, torch.full_like(below, torch.inf))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [1.0 + 2**-13, -3.0 - 2**-12, 3e-6, -2.5e-8])
def test_rounding_goes_to_a_neighbour_and_its_mean_is_the_value(format: torch.dtype, value: float) -> None:
    count = 1 << 16
    wide = torch.full((count,), value)
    narrow = torch.empty(count, dtype=format)
    round_into(narrow, wide, branch=branch(1, "test"))
    below, above = neighbours(wide[:1], format)
    assert set(narrow.tolist()) <= {below.item(), above.item()}
    low, step = below.double().item(), above.double().item() - below.double().item()
    share = (wide[0].double().item() - low) / step
    found = (narrow.double().mean().item() - low) / step
    assert abs(found - share) <= 5 * (share * (1 - share) / count) ** 0.5 + 1e-12


@given(block=st.sampled_from([8, 1 << 22]), rows=st.integers(1, 9), cut=st.integers(0, 9), seed=st.integers(0, 3))
def test_shards_are_rounded_as_the_whole_is(block: int, rows: int, cut: int, seed: int) -> None:
    with patch.object(rounded, "_BLOCK", block):
        wide = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
        whole, cut = torch.empty(rows, 5, dtype=torch.bfloat16), min(cut, rows)
        round_into(whole, wide, branch=seed)
        parts = torch.empty_like(whole)
        round_into(parts[:cut], wide[:cut], branch=seed, first=0, size=wide.numel())
        round_into(parts[cut:], wide[cut:], branch=seed, first=5 * cut, size=wide.numel())
        assert torch.equal(parts, whole)


def test_which_way_is_keyed_by_update_and_parameter() -> None:
    wide = torch.full((999,), 1 + 2.0**-9)
    drawn: list[Tensor] = []
    for key in (branch(1, 1, "a"), branch(1, 1, "b"), branch(1, 2, "a"), branch(2, 1, "a"), branch(1, 1, "a")):
        drawn.append(torch.empty(999, dtype=torch.bfloat16))
        round_into(drawn[-1], wide, branch=key)
    assert torch.equal(drawn[0], drawn[-1])
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:-1])


def squared_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    return norms(grads).square().sum()


def parameters_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return parameters


def plain_sgd(lr: float, divisor: float, clip: float | None) -> list[Tensor]:
    """g' = g/divisor · min(1, c/(‖g/divisor‖ + 1e-6)), then plain SGD, in float64."""
    parameters = parameters_of()
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
    parameters = parameters_of()
    optimizer = torch.optim.SGD(parameters, lr=0.5, fused=fused)
    grads = gradients_of(parameters)
    build_apply(Stepper(optimizer), clip_norm=clip, device=CPU, defer=defer)(grads, squared_norm(grads), divisor)
    for parameter, wanted in zip(parameters, plain_sgd(0.5, divisor, clip), strict=True):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=2e-6, atol=2e-6)


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
        parameters = parameters_of()
        kind = OwnStep if by == "step" else torch.optim.SGD
        optimizer: torch.optim.Optimizer = kind(parameters, lr=1.0, fused=fused)
        if by != "step":
            optimizer.register_step_pre_hook(look)
        if by == "hook of one of several":
            optimizer = joined((optimizer,))
        grads = gradients_of(parameters)
        build_apply(Stepper(optimizer), clip_norm=1.0, device=CPU, defer=defer)(grads, squared_norm(grads), 1024.0)
        return [parameter.detach() for parameter in parameters]

    for mine, wanted in zip(stepped(fused=True), stepped(fused=False), strict=True):
        torch.testing.assert_close(mine, wanted)
