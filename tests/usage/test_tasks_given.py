"""What is said of tasks, or given by them, and would have no effect."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import GradNorm, Hook, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import ArgumentError, EvenstepError


class Line(Task):
    def loss(self, output: Tensor, batch: Any) -> Loss | Tensor:
        return ((output - batch[1]) ** 2).sum()


class Watched(Line):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss(((output - batch[1]) ** 2).sum(), observed={"preds": output})


def data() -> MapData:
    x = torch.arange(8.0).unsqueeze(1)
    return MapData(torch.utils.data.TensorDataset(x, 2 * x), global_batch_size=4)


def built(**more: Any) -> Trainer:
    model = nn.Linear(1, 1)
    given: dict[str, Any] = {"task": Line(), "data": data(), "updates": 2, "device": "cpu"}
    return Trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **{**given, **more})


def test_a_way_of_combining_gradients_given_as_coefficients_is_answered_with_its_argument() -> None:
    tasks = {"a": Line(), "b": Line()}
    mixture = Mixture({"a": data(), "b": data()})
    with pytest.raises(ArgumentError) as raised:
        built(task=tasks, data=mixture, train=Training(coefficients=GradNorm()))  # type: ignore[arg-type]
    assert "GradNorm" in str(raised.value)


def test_gradients_that_a_hook_has_switched_off_are_named() -> None:
    class Off(Hook):
        def after_forward(self, event: Any) -> None:
            torch.set_grad_enabled(False)

    try:
        with pytest.raises(EvenstepError):
            built(hooks=[Off()]).train()
    finally:
        torch.set_grad_enabled(True)
