"""Going back through the engine directly gives what `torch.autograd.backward` gives, to the bit."""

import pytest
import torch

from evenstep.train.update.microbatch import backward_of


def test_gradients_are_those_of_backward_to_the_bit_and_are_added_to_those_that_are_there() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))
    inputs, factor = torch.randn(2, 3, 5), torch.tensor(1 / 3)
    for one in inputs:
        torch.autograd.backward((model(one).sum(),), (factor,))
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for one in inputs:
        backward_of(model(one).sum(), factor)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None and grad is not None
        assert torch.equal(parameter.grad, grad)


def test_the_graph_is_freed() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = weight * weight
    backward_of(loss, torch.ones(()))
    with pytest.raises(RuntimeError, match="second time"):  # kept, it would hold memory until the update ends
        backward_of(loss, torch.ones(()))
