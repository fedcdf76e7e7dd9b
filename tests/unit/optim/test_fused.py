"""Fused steps taken without torch's Python around the kernels: to the bit what torch's own steps give."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.optim.fused import take_step

SHAPES = ((5, 3), (7,), (), (2, 2, 2), (33,))
KINDS: dict[str, functools.partial[torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True, betas=(0.5, 0.8), fused=True),
    "maximizing": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True, eps=1e-3, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "dampened": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
}
ACTIONS = ("rate", "load", "replace", "freeze", "scale", "skip", "group", "forget", "in place")


class Side:
    """An optimizer of some parameters in two groups, and all that is done to it."""

    def __init__(self, kind: str, step: Callable[[Any], object], format: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(format)) for shape in SHAPES]
        groups = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "weight_decay": 0.3}]
        self.optimizer: Any = KINDS[kind](groups)
        self._step = step
        self._frozen: set[int] = set()

    def update(self, number: int, actions: tuple[str, ...]) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for action in actions:
            self._do(action, number)
        for index, one in enumerate(self.parameters):
            gradient = torch.randn(one.shape, generator=generator).to(one.dtype)
            one.grad = None if index in self._frozen else gradient
        if "scale" in actions:
            self.optimizer.grad_scale = torch.tensor(3.0)
        if "skip" in actions or "found" in actions:
            self.optimizer.found_inf = torch.tensor(float("skip" in actions))
        self._step(self.optimizer)
        for name in ("grad_scale", "found_inf"):
            vars(self.optimizer).pop(name, None)

    def _do(self, action: str, number: int) -> None:
        optimizer, state = self.optimizer, self.optimizer.state
        if action == "rate":
            optimizer.param_groups[number % 2]["lr"] = 0.001 * number
        if action == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        if action == "freeze":
            self._frozen ^= {number % len(SHAPES)}
        if action == "group":
            groups = optimizer.param_groups
            groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
        if action == "forget":
            state.pop(self.parameters[number % len(SHAPES)], None)
        for one in self.parameters:
            for name, value in list(state.get(one, {}).items()):
                if action == "replace" and isinstance(value, Tensor) and name != "step":
                    state[one][name] = value * 0.5
                if action == "in place" and isinstance(value, Tensor):
                    value.add_(1.0)

    def tensors(self) -> list[Tensor]:
        states = [self.optimizer.state.get(one, {}) for one in self.parameters]
        return [one.detach() for one in self.parameters] + [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ]


def assert_equal(one: Side, other: Side) -> None:
    for mine, theirs in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(each=st.lists(st.sets(st.sampled_from(ACTIONS), max_size=3).map(sorted).map(tuple), min_size=2, max_size=6))
def test_steps_are_to_the_bit_those_of_torch_whatever_was_changed_in_between(
    kind: str, each: list[tuple[str, ...]]
) -> None:
    ours, torchs = Side(kind, take_step), Side(kind, lambda optimizer: optimizer.step())
    for number, actions in enumerate([("scale",), *each, ("found",)], start=1):
        if KINDS[kind].func is torch.optim.SGD:  # whose kernel makes momenta for all of a group or for none
            actions = tuple(one for one in actions if one not in ("forget", "freeze"))
        ours.update(number, actions)
        torchs.update(number, actions)
        assert_equal(ours, torchs)
