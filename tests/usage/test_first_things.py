"""What a person may try on a trainer or engine, and each time works or is said in one line."""

# pyright: reportUnknownLambdaType=false

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import ArgumentError, NonFiniteError
from refused import refused

PAIRS = [(torch.tensor([float(x), 1.0]), torch.tensor([2.0 * x])) for x in range(8)]


class Line(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output - batch[1]).square().sum()


class Experts(nn.Module):
    """Whose second half is used from the second update on, or from when it is unfrozen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
        self.updates = 0

    def forward(self, x: Tensor) -> Tensor:
        used = self.experts[0](x)
        return used if self.updates < 2 else used + self.experts[1](x)


def _engine(model: nn.Module, lr: float = 1e-3, **options: Any) -> evenstep.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    return evenstep.Engine(model, Line(), optimizer, device="cpu")


def _trainer(model: nn.Module | None = None, **options: Any) -> evenstep.Trainer:
    model = model or nn.Linear(2, 1)
    options = {"updates": 2, "device": "cpu", **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = evenstep.MapData(PAIRS, global_batch_size=4)
    return evenstep.Trainer(model=model, task=Line(), optimizer=optimizer, data=data, **options)


def _batch() -> Any:
    return torch.stack([x for x, _ in PAIRS]), torch.stack([y for _, y in PAIRS])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fused_sgd_begins_a_parameters_momentum_when_its_first_gradient_comes(weight_decay: float) -> None:
    models = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = Experts()
        engine = _engine(model, momentum=0.9, weight_decay=weight_decay, fused=fused)
        for model.updates in range(5):
            assert isinstance(engine.update(_batch()), evenstep.train.Committed)
        models.append(model)
    for fused, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(fused, plain, rtol=1e-6)


def test_fused_sgd_with_dampening_is_refused_before_it_changes_anything() -> None:
    model = Experts()
    engine = _engine(model, momentum=0.9, dampening=0.5, fused=True)
    for model.updates in range(2):
        engine.update(_batch())
    before = [one.detach().clone() for one in model.parameters()]
    model.updates = 2
    with refused(ArgumentError, "optimizer"):
        engine.update(_batch())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_norm_whose_square_overflows_is_not_finite() -> None:
    engine = _engine(nn.Linear(2, 1))
    aborted = engine.update((torch.full((8, 2), 1e12), torch.full((8, 1), 1e13)))
    assert isinstance(aborted, evenstep.train.Aborted)
    assert isinstance(engine.explain(aborted)[1], NonFiniteError)
