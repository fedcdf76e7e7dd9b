"""What a model has around its layers, and what a layer is called with: refused by name where stages would go wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Task
from evenstep.errors import TaskError
from evenstep.pipeline import Layer, PipelineModel


class Sum(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.sum()


class Inverted(nn.Module):
    """Reads an inverted mask."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = given
        return x * (~mask if self.copies else mask.logical_not_())


class Masked(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x > 1


class Kept(nn.Module):
    def forward(self, x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        return x + given[0] * given[1]


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_what_a_later_stage_takes_may_not_be_changed_in_place_and_the_advice_works(grad: Any) -> None:
    def output(copies: bool, *begins: str, **more: Any) -> Tensor:
        last = Layer("last", Kept(), sources=("inverted", "masked"))
        layers = [Layer("masked", Masked()), Layer("inverted", Inverted(copies)), last]
        return PipelineModel(layers, stages_per_rank=len(begins) + 1, split_at=begins, **more)(torch.arange(3.0))

    with grad():
        with pytest.raises(TaskError):
            output(False, "inverted", "last")
        assert output(True, "inverted", "last").tolist() == [0.0, 1.0, 2.0]
        written = [0.0, 2.0, 0.0]  # the last layer, too, reads the inverted mask, as without stages
        assert output(False, "inverted").tolist() == output(False, "last").tolist() == written


class Normed(nn.Module):
    """A body whose norm stays in evaluation mode by a `train` of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def layers(self) -> list[Layer]:
        return [*(Layer(f"body.{place}", part) for place, part in enumerate(self.body)), Layer("head", self.head)]

    def train(self, mode: bool = True) -> "Normed":
        super().train(mode)
        self.body[1].eval()
        return self


@pytest.mark.parametrize("staged", [False, True])
def test_a_train_of_the_models_own_is_called_and_what_is_in_evaluation_mode_stays_so(staged: bool) -> None:
    whole = Normed()
    whole.body[2].eval()
    model = PipelineModel(whole, stages_per_rank=2) if staged else whole
    engine = Engine(model, Sum(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    for _ in range(2):
        engine.update(torch.arange(6.0).view(3, 2))
        engine.evaluate(torch.ones(3, 2))
    assert [part.training for part in whole.body] == [True, False, False]
    assert model.training
    assert torch.equal(whole.body[1].running_mean, torch.zeros(2))
