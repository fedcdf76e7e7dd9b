"""The moving average against its formula, and the tensors that it can follow."""

from typing import Any

import pytest
import torch
from torch import nn

from evenstep.optim.ema import Average, Ema


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False).double()
    moved(model, 0.0)
    return model


def moved(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def following(model: nn.Module, **options: Any) -> Average:
    return Average(Ema(**{"decay_warmup": False} | options), model)


def averaged(average: Average, model: nn.Linear) -> float:
    with average.swapped():
        return model.weight.item()


@pytest.mark.parametrize(("warmup", "on_device"), [(False, True), (True, False)])
@pytest.mark.parametrize(("start", "every"), [(0, 1), (4, 1), (4, 3), (3, 10)])
def test_the_average_follows_its_formula(start: int, every: int, warmup: bool, on_device: bool) -> None:
    model = line()
    average = following(model, decay=0.5, start_update=start, every_updates=every, decay_warmup=warmup)
    expected, moves = 0.0, 0
    for update in range(1, 25):
        value = float(update**2 % 7)
        moved(model, value)
        average.after_update(update, torch.tensor(0.0) if on_device else 0.0)
        if update == start or (update < start and update % every == 0):
            expected = value
        elif update > start and update % every == 0:
            moves += 1
            decay = min(0.5, (1 + moves) / (10 + moves)) if warmup else 0.5
            expected = decay * expected + (1 - decay) * value
        assert averaged(average, model) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("format", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_narrow_numbers_are_averaged_in_wider_ones(format: torch.dtype, wide: torch.dtype) -> None:
    model = line()
    model.register_buffer("table", torch.zeros(2).to(format))
    average = following(model, decay=0.75)
    model.get_buffer("table").copy_(torch.ones(2))
    average.after_update(1)
    assert average.state_dict()["table"].dtype == wide
    assert average.state_dict()["table"].tolist() == [0.25, 0.25]
