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


class Infinite(nn.Module):
    """Gives -inf for the first column, as a mask does."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.masked_fill(torch.tensor([True, False]), -torch.inf)


class Ends(nn.Module):
    def __init__(self, *, mask: bool) -> None:
        super().__init__()
        self.mask, self.head = Infinite(), nn.Linear(2, 2)
        self.ends_masked = not mask

    def forward(self, inputs: Tensor) -> Tensor:
        if self.ends_masked:
            return self.mask(self.head(inputs))
        return self.head(self.mask(inputs).softmax(-1))


def spoiled(model: nn.Module, name: str) -> nn.Module:
    nn.init.constant_(model.get_parameter(name), math.nan)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (spoiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0.weight"), "the output of module `0` (Linear)"),
        (spoiled(Ends(mask=True), "head.weight"), "the output of module `head` (Linear)"),
        (spoiled(nn.Sequential(Infinite(), nn.Softmax(-1), nn.Linear(2, 1)), "2.bias"), "the output of module `2`"),
        (Ends(mask=False), "the output of module `mask` (Infinite)"),
        (nn.Sequential(zeroed(nn.Linear(2, 2)), Root(), nn.Linear(2, 1)), "but the gradients of 0.weight, 0.bias"),
        (Ends(mask=True), "all numbers are finite"),
    ],
    ids=["first", "behind a mask", "behind a mask that a module removes", "-inf to the end", "gradients", "none"],
)
def test_the_first_module_that_is_not_finite_is_named(model: nn.Module, words: str) -> None:
    assert words in diagnose(model, summed(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
