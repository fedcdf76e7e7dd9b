import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.optim.ema import Ema


def moved(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def averaged(ema: Ema, model: nn.Linear) -> float:
    with ema.swapped():
        return model.weight.item()


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    moved(model, 0.0)
    return model


def test_the_average_follows_its_formula() -> None:
    model, ema, wanted = line(), Ema(decay=0.8), 0.0
    ema.attach(model)
    for update, value in enumerate([1.0, -2.0, 5.0], start=1):
        moved(model, value)
        ema.after_update(update)
        wanted = 0.8 * wanted + 0.2 * value
    assert averaged(ema, model) == pytest.approx(wanted, rel=1e-6)


def test_up_to_the_start_update_it_is_a_copy() -> None:
    model, ema = line(), Ema(decay=0.5, start_update=2)
    ema.attach(model)
    for update, value in enumerate([1.0, 4.0, 8.0], start=1):
        moved(model, value)
        ema.after_update(update)
    assert averaged(ema, model) == 6.0


def test_it_moves_at_every_so_many_updates_only() -> None:
    model, ema = line(), Ema(decay=0.0, every_updates=2)
    ema.attach(model)
    moved(model, 1.0)
    ema.after_update(1)
    assert averaged(ema, model) == 0.0
    ema.after_update(2)
    assert averaged(ema, model) == 1.0


def test_an_update_that_only_the_device_knows_as_aborted_moves_nothing() -> None:
    model, ema = line(), Ema(decay=0.5)
    ema.attach(model)
    moved(model, 4.0)
    ema.after_update(1, torch.tensor(1.0))
    assert averaged(ema, model) == 0.0
    ema.after_update(1, torch.tensor(0.0))
    assert averaged(ema, model) == 2.0


def test_swapping_gives_the_model_back_also_when_something_raises() -> None:
    model, ema = line(), Ema(decay=0.5)
    ema.attach(model)
    moved(model, 4.0)
    with pytest.raises(ValueError, match="stop"), ema.swapped():
        assert model.weight.item() == 0.0
        raise ValueError("stop")
    assert model.weight.item() == 4.0


def test_integer_buffers_are_copied_and_statistics_averaged() -> None:
    model, ema = nn.BatchNorm1d(1), Ema(decay=0.75)
    ema.attach(model)
    model(torch.tensor([[1.0], [3.0]]))
    ema.after_update(1)
    state = ema.state_dict()
    assert int(state["num_batches_tracked"]) == 1
    assert float(state["running_mean"]) == pytest.approx(0.25 * 0.2)


def test_sixteen_bit_parameters_are_averaged_in_float32() -> None:
    model = line().bfloat16()
    ema = Ema(decay=0.999)
    ema.attach(model)
    moved(model, 1.0)
    ema.after_update(1)
    assert ema.state_dict()["weight"].dtype == torch.float32
    assert float(ema.state_dict()["weight"]) == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("arguments", [{"decay": 1.0}, {"decay": -0.1}, {"start_update": -1}, {"every_updates": 0}])
def test_numbers_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        Ema(**arguments)  # type: ignore[arg-type]


def test_float8_buffers_are_averaged_in_float32() -> None:
    model, ema = line(), Ema(decay=0.5)
    model.register_buffer("scale", torch.zeros(2).to(torch.float8_e4m3fn))
    ema.attach(model)
    model.get_buffer("scale").copy_(torch.ones(2))
    ema.after_update(1)
    assert ema.state_dict()["scale"].tolist() == [0.5, 0.5]


def test_a_buffer_that_nothing_can_be_written_into_is_refused_by_name() -> None:
    model = line()
    model.register_buffer("mask", torch.ones(1).expand(4), persistent=False)
    with pytest.raises(ArgumentError, match=r"`mask` .* the same memory .*clone"):
        Ema().attach(model)
