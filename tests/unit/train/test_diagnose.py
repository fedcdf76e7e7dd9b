"""Where numbers come from that are not finite: in the forward, and in the backward alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer
from evenstep.errors import NonFiniteError
from evenstep.events import Hook, Incident
from evenstep.parallel import Group
from evenstep.train.causes.diagnose import diagnose, gradient_norms


class Root(nn.Module):
    """√x, whose derivative at 0 is infinite."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sqrt()


class OfWeight(nn.Module):
    """Multiplies by √w."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale.sqrt()


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(inputs)


class Between(nn.Module):
    """The root stands in the forward of the whole, in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).sqrt())


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def summed(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.ones(3, 2)).sum().backward()


PLACES = {
    "a module": (
        lambda: nn.Sequential(zeroed(nn.Linear(2, 2)), nn.Sequential(nn.Tanh(), Root()), nn.Linear(2, 1)),
        "the backward of module `1.1` (Root) made the first of them",
    ),
    "a module whose input is also used beside it": (
        lambda: nn.Sequential(zeroed(nn.Linear(2, 2)), Residual(Root()), nn.Linear(2, 1)),
        "the backward of module `1.inner` (Root) made the first of them",
    ),
    "a parameter": (
        lambda: nn.Sequential(nn.Linear(2, 2), OfWeight(), nn.Linear(2, 1)),
        "the backward of module `1` (OfWeight) made the gradient of its parameter `scale` so",
    ),
    "between modules": (
        lambda: zeroed(Between()),
        "they come from what is computed from the output of module `first` (Linear) outside of any module",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_non_finite_made_in_the_backward_names_its_module(place: str) -> None:
    make, words = PLACES[place]
    model = make()
    if place == "between modules":  # or nothing but zeros comes back to the root
        nn.init.ones_(model.get_parameter("last.weight"))
    text = diagnose(model, summed(model))
    assert text.startswith("all outputs are finite, but the gradients of ")
    assert text.endswith(words)


def test_a_loss_that_makes_it_is_named_as_such() -> None:
    model = zeroed(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    text = diagnose(model, lambda: model(torch.ones(3, 2)).sqrt().sum().backward())
    assert text.endswith("they come from the loss: look at it")


def test_a_gradient_of_minus_infinity_is_not_taken_for_a_mask() -> None:
    model = nn.Sequential(zeroed(nn.Linear(2, 2)), Root(), nn.Linear(2, 1))
    nn.init.constant_(model[2].weight, -1.0)
    assert "`1` (Root)" in diagnose(model, summed(model))


def test_watching_leaves_no_hook_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    diagnose(model, summed(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_norms_are_of_each_parameter_and_say_inf_in_words() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([math.inf])
    assert gradient_norms(model, Group()) == {"weight": 5.0, "bias": "inf"}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64, torch.bfloat16])
def test_norms_are_of_gradients_in_any_format(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1, 2, dtype=dtype))
    model.weight.grad = torch.tensor([[3.0, 4.0]], dtype=dtype) * (1j if dtype.is_complex else 1)
    assert gradient_norms(model, Group()) == {"weight": 5.0}


class Summed(Task):
    """The sum of the outputs."""

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return output.sum()


def test_the_incident_that_ends_a_run_names_the_module_and_each_layer_s_gradient_norm() -> None:
    class Keep(Hook):
        def on_incident(self, event: Incident) -> None:
            heard.append(event)

    heard: list[Incident] = []
    model = nn.Sequential(zeroed(nn.Linear(2, 2)), Root(), nn.Linear(2, 1))
    trainer = Trainer(
        model=model,
        task=Summed(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=MapData([torch.ones(2)] * 8, global_batch_size=4),
        updates=2,
        device="cpu",
        hooks=[Keep()],
    )
    with pytest.raises(NonFiniteError, match=r"the backward of module `1` \(Root\)"):
        trainer.train()
    (incident,) = [one for one in heard if one.kind == "non_finite"]
    norms = incident.details["grad_norms"]
    assert isinstance(norms, dict)
    assert norms["0.weight"] == "inf"
    assert norms["2.bias"] == pytest.approx(1.0)
    assert "the backward of module `1` (Root)" in incident.message
