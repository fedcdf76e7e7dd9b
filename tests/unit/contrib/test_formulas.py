"""The steps of torch's optimizers as formulas: those of the optimizers themselves, and their state."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evenstep.contrib.compiled_update.formulas import OptimizerState

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
    "decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": lambda p: SGD(p, lr=0.01, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (3, 2)]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in (3, 2)]


def by_itself(optimizer: Optimizer, held: list[nn.Parameter], step: int, own: tuple[int, ...]) -> None:
    for number, (one, gradient) in enumerate(zip(held, gradients(step), strict=True)):
        one.grad = gradient if number in own else None
    optimizer.step()


def by_formula(
    state: OptimizerState, optimizer: Optimizer, held: list[nn.Parameter], step: int, own: tuple[int, ...]
) -> None:
    """A step by formulas; the first of a parameter is the optimizer's own."""
    state.follow()
    if state.lacks(own):
        by_itself(optimizer, held, step, own)
        state.read()
        return
    formulas, (rows, firsts) = state.formulas(own), state.rows(own)
    numbers = [torch.tensor(n, dtype=torch.float64) for one in firsts for n in state.numbers(one)]
    width = formulas[0].width
    for place, number in enumerate(own):
        kept = state.tensors(own)[place]
        row = numbers[rows[place] * width : (rows[place] + 1) * width]
        after, states = formulas[place].step(held[number].detach(), gradients(step)[number], kept, row)
        held[number].data.copy_(after)
        for old, new in zip(kept, states, strict=True):
            old.copy_(new)
    for count in state.counts(own):
        count.add_(1)
    state.committed(own)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_formula_is_the_optimizers_step_in_float64(name: str) -> None:
    expected, found = parameters(), parameters()
    optimizer, other = OPTIMIZERS[name](expected), OPTIMIZERS[name](found)
    state = OptimizerState(other)
    for step in range(8):
        own = (0, 1) if step % 3 else (0,)  # the second has its first gradient later, and not always
        by_itself(optimizer, expected, step, own)
        by_formula(state, other, found, step, own)
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    for one, another in zip(expected, found, strict=True):
        assert torch.allclose(one, another, rtol=1e-12, atol=1e-14)
    kept, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert kept.keys() == theirs.keys()
    for number, one in kept.items():
        assert one.keys() == theirs[number].keys()
        for key, value in one.items():
            assert value is theirs[number][key] or torch.allclose(value, theirs[number][key], rtol=1e-12), key


def test_state_that_was_loaded_is_followed() -> None:
    held = parameters()
    optimizer = AdamW(held, lr=0.1)
    state = OptimizerState(optimizer)
    assert state.lacks((0,))
    by_formula(state, optimizer, held, 0, (0, 1))
    saved = deepcopy(optimizer.state_dict())
    by_formula(state, optimizer, held, 1, (0, 1))
    optimizer.load_state_dict(saved)
    by_formula(state, optimizer, held, 2, (0, 1))
    assert [float(one["step"]) for one in optimizer.state.values()] == [2.0, 2.0]
