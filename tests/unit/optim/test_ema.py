from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Task, Training
from evenstep.errors import ArgumentError
from evenstep.optim.ema import Average, Ema
from refused import refused


def moved(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def averaged(ema: Average, model: nn.Linear) -> float:
    with ema.swapped():
        return model.weight.item()


def following(model: nn.Module, **options: Any) -> Average:
    return Average(Ema(**{"decay_warmup": False} | options), model)


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.square().sum()


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    moved(model, 0.0)
    return model


def test_the_average_follows_its_formula() -> None:
    model, wanted = line(), 0.0
    ema = following(model, decay=0.8)
    for update, value in enumerate([1.0, -2.0, 5.0], start=1):
        moved(model, value)
        ema.after_update(update)
        wanted = 0.8 * wanted + 0.2 * value
    assert averaged(ema, model) == pytest.approx(wanted, rel=1e-6)


def test_up_to_the_start_update_it_is_a_copy() -> None:
    model = line()
    ema = following(model, decay=0.5, start_update=2)
    for update, value in enumerate([1.0, 4.0, 8.0], start=1):
        moved(model, value)
        ema.after_update(update)
    assert averaged(ema, model) == 6.0


@pytest.mark.parametrize("every", [1, 2, 3, 4, 10])
def test_it_begins_with_the_parameters_of_its_start_update_however_seldom_it_moves(every: int) -> None:
    model, wanted = line().double(), 0.0
    ema = following(model, decay=0.5, start_update=4, every_updates=every)
    for update in range(1, 25):
        moved(model, value := float(update**2 % 7))
        ema.after_update(update)
        if update == 4:
            wanted = value  # a copy, of this very update
            assert averaged(ema, model) == wanted
        elif update > 4:
            wanted = 0.5 * wanted + 0.5 * value if update % every == 0 else wanted
    assert averaged(ema, model) == pytest.approx(wanted, rel=1e-14)


def test_it_moves_at_every_so_many_updates_only() -> None:
    model = line()
    ema = following(model, decay=0.0, every_updates=2)
    moved(model, 1.0)
    ema.after_update(1)
    assert averaged(ema, model) == 0.0
    ema.after_update(2)
    assert averaged(ema, model) == 1.0


def test_a_float64_average_is_the_formulas_also_where_only_the_device_knows_of_the_verdict() -> None:
    model = line().double()
    ema = following(model, decay=0.9)
    moved(model, 1.0)
    ema.after_update(1, torch.tensor(0.0))
    assert averaged(ema, model) == pytest.approx(1 - 0.9, rel=1e-15)


def test_an_update_that_only_the_device_knows_as_aborted_moves_nothing() -> None:
    model = line()
    ema = following(model, decay=0.5)
    moved(model, 4.0)
    ema.after_update(1, torch.tensor(1.0))
    assert averaged(ema, model) == 0.0
    ema.after_update(1, torch.tensor(0.0))
    assert averaged(ema, model) == 2.0


def test_swapping_gives_the_model_back_also_when_something_raises() -> None:
    model = line()
    ema = following(model, decay=0.5)
    moved(model, 4.0)
    with pytest.raises(ValueError, match="stop"), ema.swapped():
        assert model.weight.item() == 0.0
        raise ValueError("stop")
    assert model.weight.item() == 4.0


def test_integer_buffers_are_copied_and_statistics_averaged() -> None:
    model = nn.BatchNorm1d(1)
    ema = following(model, decay=0.75)
    model(torch.tensor([[1.0], [3.0]]))
    ema.after_update(1)
    state = ema.state_dict()
    assert int(state["num_batches_tracked"]) == 1
    assert float(state["running_mean"]) == pytest.approx(0.25 * 0.2)


def test_sixteen_bit_parameters_are_averaged_in_float32() -> None:
    model = line().bfloat16()
    ema = following(model, decay=0.999)
    moved(model, 1.0)
    ema.after_update(1)
    assert ema.state_dict()["weight"].dtype == torch.float32
    assert float(ema.state_dict()["weight"]) == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"decay": 1.0}, "decay"),
        ({"evaluated": "mean"}, "evaluated"),
        ({"start_update": 8}, "start_update"),
        ({"every_updates": 9}, "every_updates"),
        ({"start_update": 5, "every_updates": 5}, "every_updates"),
    ],
)
def test_an_impossible_average_is_refused(arguments: dict[str, Any], field: str) -> None:
    with refused(ArgumentError, field):
        Ema(**arguments).check(8)
    model = line()
    with refused(ArgumentError, field):
        Engine(
            model,
            Square(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            updates=8,
            device="cpu",
            train=Training(ema=Ema(**arguments)),
        )
    Ema(start_update=7).check(8)
    Ema(start_update=5, every_updates=4).check(8)


def test_float8_buffers_are_averaged_in_float32() -> None:
    model = line()
    model.register_buffer("scale", torch.zeros(2).to(torch.float8_e4m3fn))
    ema = following(model, decay=0.5)
    model.get_buffer("scale").copy_(torch.ones(2))
    ema.after_update(1)
    assert ema.state_dict()["scale"].tolist() == [0.5, 0.5]


def test_a_buffer_that_nothing_can_be_written_into_is_refused_by_name() -> None:
    model = line()
    model.register_buffer("mask", torch.ones(1).expand(4), persistent=False)
    with refused(ArgumentError, "ema"):
        following(model)


def test_an_average_of_a_short_run_follows_its_parameters_by_default() -> None:
    model = line().double()
    average = Average(Ema(), model)
    for update in range(1, 201):
        moved(model, float(update))
        average.after_update(update)
    assert averaged(average, model) > 170


def test_a_warmed_up_average_follows_its_formula_in_float64() -> None:
    model, wanted = line().double(), 0.0
    ema = following(model, decay=0.5, start_update=3, every_updates=2, decay_warmup=True)
    moves = 0
    for update in range(1, 40):
        moved(model, value := float(update**2 % 7))
        ema.after_update(update)
        if update % 2 == 0 or update == 3:
            moves += update > 3
            decay = 0.0 if update <= 3 else min(0.5, (1 + moves) / (10 + moves))
            wanted = decay * wanted + (1 - decay) * value
    assert averaged(ema, model) == pytest.approx(wanted, rel=1e-14)


def test_the_warm_up_is_a_function_of_the_update_so_that_a_resumed_average_has_the_same_bits() -> None:
    model = line()
    ema = following(model, decay=0.99, decay_warmup=True)
    for update in range(1, 9):
        moved(model, update**0.5)
        ema.after_update(update)
        if update == 5:
            saved = {name: one.clone() for name, one in ema.state_dict().items()}
    other = line()
    again = following(other, decay=0.99, decay_warmup=True)
    again.load_state_dict(saved)
    for update in range(6, 9):
        moved(other, update**0.5)
        again.after_update(update)
    assert torch.equal(ema.state_dict()["weight"], again.state_dict()["weight"])


def test_what_a_tensor_is_called_does_not_matter() -> None:
    """As `version`, which other systems leave out wherever it is part of a name."""
    model = nn.Module()
    model.conversion = nn.Linear(1, 1)
    model.register_buffer("version", torch.zeros(1))
    ema = following(model, decay=0.5)
    before = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(2.0)
    ema.after_update(1)
    moves = {name: (tensor - before[name]).item() for name, tensor in ema.state_dict().items()}
    assert moves == pytest.approx(dict.fromkeys(("conversion.weight", "conversion.bias", "version"), 1.0))


def test_integers_and_flags_are_copied_also_once_the_decay_has_begun() -> None:
    model = line()
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    model.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
    ema = following(model, decay=0.5)
    model.get_buffer("seen").fill_(7)
    model.get_buffer("flag").fill_(True)
    ema.after_update(1)
    ema.after_update(2)
    assert ema.state_dict()["seen"].tolist() == [7, 7]
    assert ema.state_dict()["flag"].item() is True


def test_a_buffer_that_grows_is_averaged_anew_from_then_on() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.zeros(2), persistent=False)
    table = model.get_buffer("table")
    ema = following(model, decay=0.5)
    table.resize_(3).fill_(4.0)
    ema.after_update(1)
    assert torch.equal(ema.state_dict()["table"], torch.full((3,), 4.0))
    table.fill_(8.0)
    ema.after_update(2)
    with ema.swapped():
        assert torch.equal(table, torch.full((3,), 6.0))
        table.resize_(5).fill_(1.0)
    assert torch.equal(table, torch.ones(5))
    with ema.swapped():
        assert torch.equal(table, torch.ones(5))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_the_average_of_complex_numbers_in_16_bits_is_in_wider_ones() -> None:
    model = line()
    model.register_buffer("table", torch.zeros(2, dtype=torch.complex32))
    ema = following(model, decay=0.5)
    model.get_buffer("table").copy_(torch.tensor([2 + 2j, 4]))
    ema.after_update(1)
    with ema.swapped():
        assert model.get_buffer("table").to(torch.complex64).tolist() == [1 + 1j, 2]
