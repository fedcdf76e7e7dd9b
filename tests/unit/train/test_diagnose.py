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
from evenstep.train.aborts import diagnose, gradient_norms


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


def test_the_incident_that_ends_a_run_has_each_parameter_s_gradient_norm() -> None:
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
    with pytest.raises(NonFiniteError):
        trainer.train()
    (incident,) = [one for one in heard if one.kind == "non_finite"]
    norms = incident.details["grad_norms"]
    assert isinstance(norms, dict)
    assert norms["0.weight"] == "inf"
    assert norms["2.bias"] == pytest.approx(1.0)
    assert "the gradients of 0.weight" in incident.message
