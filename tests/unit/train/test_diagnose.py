"""Where numbers come from that are not finite: in the forward, and in the backward alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evenstep.train.ledger import diagnose


class Root(nn.Module):
    """√x, whose derivative at 0 is infinite."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sqrt()


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def summed(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.ones(3, 2)).sum().backward()


class Infinite(nn.Module):
    """Gives -inf for the first column, as a mask does."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.masked_fill(torch.tensor([True, False]), -torch.inf)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = Infinite()
        self.head = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.mask(inputs).softmax(-1))


def spoiled(model: nn.Module, name: str) -> nn.Module:
    nn.init.constant_(model.get_parameter(name), math.nan)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (spoiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0.weight"), "the output of module `0` (Linear)"),
        (spoiled(Ends(), "head.weight"), "the output of module `head` (Linear)"),
        (spoiled(nn.Sequential(Infinite(), nn.Softmax(-1), nn.Linear(2, 1)), "2.bias"), "the output of module `2`"),
        (nn.Sequential(zeroed(nn.Linear(2, 2)), Root(), nn.Linear(2, 1)), "but the gradients of 0.weight, 0.bias"),
        (nn.Sequential(nn.Linear(2, 2), Infinite()), "the output of module `1` (Infinite)"),
        (Ends(), "all numbers are finite"),
    ],
    ids=["first", "behind a mask", "behind a mask that a module removes", "gradients", "-inf to the end", "none"],
)
def test_the_first_module_that_is_not_finite_is_named(model: nn.Module, words: str) -> None:
    assert words in diagnose(model, summed(model))[1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
