"""Linear layers whose weight gradients wait, against plain ones: the same bits."""

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from evenstep.pipeline.deferred import Deferral, prepare


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).tanh())


def made(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(bias), Block(bias))


def gradients(model: nn.Module, x: Tensor, deferral: Deferral | None) -> list[Tensor | None]:
    """Of the input and the parameters, after two micro-batches; in two halves if there is a deferral."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        output = model(x)
        if deferral is not None:
            deferral.waiting = []
        output.backward(torch.ones_like(output))
        if deferral is not None:
            with torch.no_grad():
                for work in deferral.end():
                    work()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def all_equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None) and [
        a is None for a in left
    ] == [b is None for b in right]


@pytest.mark.parametrize(
    ("bias", "shape", "dtype"),
    [(True, (5, 8), torch.float32), (False, (2, 3, 4, 8), torch.float64), (True, (8,), torch.bfloat16)],
)
def test_two_halves_are_the_whole(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = gradients(made(bias=bias).to(dtype), x, None)
    for halves in (True, False):
        model, deferral = made(bias=bias).to(dtype), Deferral()
        prepare(model, deferral)
        assert all_equal(gradients(model, x, deferral if halves else None), wanted)


def hooked(model: nn.Sequential) -> None:
    """Gradients are masked and halved by hooks of the user's."""
    first, second = cast("nn.Linear", model[0].first), cast("nn.Linear", model[1].second)
    first.weight.register_hook(lambda gradient: gradient * (torch.arange(8) % 2))
    if second.bias is not None:
        second.bias.register_hook(lambda gradient: gradient / 2)


def normalised(model: nn.Sequential) -> None:
    """Weights are tensors that are computed of others, as `torch.nn.utils.weight_norm` has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(cast("nn.Linear", model[0].first))


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(cast("nn.Linear", model[1].first), "weight", amount=0.3)


@pytest.mark.parametrize(("change", "bias"), [(hooked, True), (normalised, False), (pruned, True)])
def test_weights_that_autograd_must_see_have_their_gradients_in_the_first_half(change: Any, bias: bool) -> None:
    x, found = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)), []
    for deferral in (None, Deferral()):
        model = made(bias=bias)
        if deferral is not None:
            prepare(model, deferral)
        change(model)
        found.append(gradients(model, x, deferral))
    assert all_equal(*found)


def test_frozen_parameters_get_none() -> None:
    x, found = torch.randn(5, 8), []
    for deferral in (None, Deferral()):
        model = made()
        cast("Any", model)[0].first.weight.requires_grad_(False)
        cast("Any", model)[1].second.bias.requires_grad_(False)
        if deferral is not None:
            prepare(model, deferral)
        found.append(gradients(model, x, deferral))
    assert all_equal(*found)
