"""What is taken out of an update that is compared: chance, and casts to float32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.tools.prove.laboratory import Laboratory


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: functional.dropout(x, 0.3),
        nn.Dropout(0.9),
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    ],
)
def test_dropout_passes_everything_through_and_gradients_are_those_without_it(
    dropout: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    with Laboratory(wide=False):
        first, second = dropout(x), dropout(x)
        (gradient,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    attention = functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
    without = x if bool(torch.isclose(first, x, rtol=1e-12).all()) else attention
    torch.testing.assert_close(first, without, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(without.sum(), x)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda: torch.rand(3), 0.5),
        (lambda: torch.randn(3, 2), 0.5),
        (lambda: torch.normal(torch.zeros(2), 2.0), 1.0),
        (lambda: torch.distributions.Beta(1.0, 3.0).sample((2,)), 0.25),
        (lambda: torch.empty(3).uniform_(1, 3), 2.0),
        (lambda: torch.empty(3).bernoulli_(0.25), 0.25),
        (lambda: torch.randint(4, 10, (3,)), 7.0),
    ],
)
def test_random_numbers_are_one_that_each_could_be(draw: Callable[[], Tensor], mean: float) -> None:
    with Laboratory(wide=False):
        drawn = draw()
    assert drawn.double().tolist() == torch.full(drawn.shape, mean, dtype=torch.float64).tolist()
    assert draw().dtype == drawn.dtype


def test_casts_to_float32_are_made_to_float64() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with Laboratory(wide=True):
        assert all(torch.equal(one, x) for one in (x.float(), x.to(torch.float32), x.type(torch.float32)))
        assert functional.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64
    assert x.float().dtype == torch.float32
